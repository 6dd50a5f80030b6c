from protos.deepinfer.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VisionServiceInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VisionServiceInfoResponse(_message.Message):
    __slots__ = ("model", "revision", "instance", "epoch", "embedding_width", "max_image_bytes", "max_pixels", "formats")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    instance: str
    epoch: int
    embedding_width: int
    max_image_bytes: int
    max_pixels: int
    formats: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., embedding_width: _Optional[int] = ..., max_image_bytes: _Optional[int] = ..., max_pixels: _Optional[int] = ..., formats: _Optional[_Iterable[str]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("request_id", "image", "landing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    LANDING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    image: bytes
    landing: _common_pb2.Landing
    def __init__(self, request_id: _Optional[str] = ..., image: _Optional[bytes] = ..., landing: _Optional[_Union[_common_pb2.Landing, _Mapping]] = ...) -> None: ...

class EmbeddingHandle(_message.Message):
    __slots__ = ("content_hash", "tokens", "width", "dtype", "extents", "digest_kind")
    CONTENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_KIND_FIELD_NUMBER: _ClassVar[int]
    content_hash: bytes
    tokens: int
    width: int
    dtype: str
    extents: _containers.RepeatedCompositeFieldContainer[_common_pb2.Extent]
    digest_kind: _common_pb2.DigestKind
    def __init__(self, content_hash: _Optional[bytes] = ..., tokens: _Optional[int] = ..., width: _Optional[int] = ..., dtype: _Optional[str] = ..., extents: _Optional[_Iterable[_Union[_common_pb2.Extent, _Mapping]]] = ..., digest_kind: _Optional[_Union[_common_pb2.DigestKind, str]] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: EmbeddingHandle
    def __init__(self, handle: _Optional[_Union[EmbeddingHandle, _Mapping]] = ...) -> None: ...
