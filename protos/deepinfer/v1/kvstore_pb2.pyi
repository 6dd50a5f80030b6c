from protos.deepinfer.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORD_KIND_UNSPECIFIED: _ClassVar[RecordKind]
    RECORD_KIND_BLOCK: _ClassVar[RecordKind]
    RECORD_KIND_ANCHOR: _ClassVar[RecordKind]
RECORD_KIND_UNSPECIFIED: RecordKind
RECORD_KIND_BLOCK: RecordKind
RECORD_KIND_ANCHOR: RecordKind

class KvStoreServiceInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvStoreServiceInfoResponse(_message.Message):
    __slots__ = ("instance", "epoch", "capacity_bytes", "used_bytes", "records", "max_record_bytes", "landing_bytes", "transport_lane", "digest_kind")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LANDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_LANE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_KIND_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    capacity_bytes: int
    used_bytes: int
    records: int
    max_record_bytes: int
    landing_bytes: int
    transport_lane: str
    digest_kind: _common_pb2.DigestKind
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., records: _Optional[int] = ..., max_record_bytes: _Optional[int] = ..., landing_bytes: _Optional[int] = ..., transport_lane: _Optional[str] = ..., digest_kind: _Optional[_Union[_common_pb2.DigestKind, str]] = ...) -> None: ...

class BlockName(_message.Message):
    __slots__ = ("key", "token_ids", "tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: bytes
    def __init__(self, key: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class BlockNames(_message.Message):
    __slots__ = ("keys", "tokens")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    tokens: bytes
    def __init__(self, keys: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("blocks", "model_revision", "layout_fingerprint", "anchor", "names")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockName]
    model_revision: str
    layout_fingerprint: str
    anchor: bool
    names: BlockNames
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockName, _Mapping]]] = ..., model_revision: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., anchor: _Optional[bool] = ..., names: _Optional[_Union[BlockNames, _Mapping]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("blocks_held", "anchor_blocks", "other_instance", "other_blocks")
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OTHER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OTHER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks_held: int
    anchor_blocks: int
    other_instance: str
    other_blocks: int
    def __init__(self, blocks_held: _Optional[int] = ..., anchor_blocks: _Optional[int] = ..., other_instance: _Optional[str] = ..., other_blocks: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("blocks", "first_block", "anchor", "model_revision", "layout_fingerprint", "landing", "parent_key", "names")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LANDING_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockName]
    first_block: int
    anchor: bool
    model_revision: str
    layout_fingerprint: str
    landing: _common_pb2.Landing
    parent_key: bytes
    names: BlockNames
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockName, _Mapping]]] = ..., first_block: _Optional[int] = ..., anchor: _Optional[bool] = ..., model_revision: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., landing: _Optional[_Union[_common_pb2.Landing, _Mapping]] = ..., parent_key: _Optional[bytes] = ..., names: _Optional[_Union[BlockNames, _Mapping]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("extents", "digest_kind", "blocks", "anchor")
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_KIND_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedCompositeFieldContainer[_common_pb2.Extent]
    digest_kind: _common_pb2.DigestKind
    blocks: int
    anchor: bool
    def __init__(self, extents: _Optional[_Iterable[_Union[_common_pb2.Extent, _Mapping]]] = ..., digest_kind: _Optional[_Union[_common_pb2.DigestKind, str]] = ..., blocks: _Optional[int] = ..., anchor: _Optional[bool] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("offer", "commit")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    offer: PutOffer
    commit: PutCommit
    def __init__(self, offer: _Optional[_Union[PutOffer, _Mapping]] = ..., commit: _Optional[_Union[PutCommit, _Mapping]] = ...) -> None: ...

class PutOffer(_message.Message):
    __slots__ = ("records", "model_revision", "layout", "retention", "owner")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RecordOffer]
    model_revision: str
    layout: _common_pb2.Layout
    retention: _common_pb2.RetentionClass
    owner: bytes
    def __init__(self, records: _Optional[_Iterable[_Union[RecordOffer, _Mapping]]] = ..., model_revision: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., retention: _Optional[_Union[_common_pb2.RetentionClass, str]] = ..., owner: _Optional[bytes] = ...) -> None: ...

class RecordOffer(_message.Message):
    __slots__ = ("kind", "name", "parent_key", "size")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    kind: RecordKind
    name: BlockName
    parent_key: bytes
    size: int
    def __init__(self, kind: _Optional[_Union[RecordKind, str]] = ..., name: _Optional[_Union[BlockName, _Mapping]] = ..., parent_key: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class PutCommit(_message.Message):
    __slots__ = ("records", "digest_kind")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_KIND_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.ExtentList]
    digest_kind: _common_pb2.DigestKind
    def __init__(self, records: _Optional[_Iterable[_Union[_common_pb2.ExtentList, _Mapping]]] = ..., digest_kind: _Optional[_Union[_common_pb2.DigestKind, str]] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("grant", "committed")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    grant: PutGrant
    committed: PutCommitted
    def __init__(self, grant: _Optional[_Union[PutGrant, _Mapping]] = ..., committed: _Optional[_Union[PutCommitted, _Mapping]] = ...) -> None: ...

class PutGrant(_message.Message):
    __slots__ = ("wanted", "landing", "offsets", "other_instance")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LANDING_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    OTHER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    wanted: _containers.RepeatedScalarFieldContainer[int]
    landing: _common_pb2.Landing
    offsets: _containers.RepeatedScalarFieldContainer[int]
    other_instance: str
    def __init__(self, wanted: _Optional[_Iterable[int]] = ..., landing: _Optional[_Union[_common_pb2.Landing, _Mapping]] = ..., offsets: _Optional[_Iterable[int]] = ..., other_instance: _Optional[str] = ...) -> None: ...

class PutCommitted(_message.Message):
    __slots__ = ("stored", "rejected")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    rejected: int
    def __init__(self, stored: _Optional[int] = ..., rejected: _Optional[int] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("blocks", "model_revision", "layout_fingerprint", "anchor", "names")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockName]
    model_revision: str
    layout_fingerprint: str
    anchor: bool
    names: BlockNames
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockName, _Mapping]]] = ..., model_revision: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., anchor: _Optional[bool] = ..., names: _Optional[_Union[BlockNames, _Mapping]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("blocks_held", "blocks_rising", "other_instance")
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RISING_FIELD_NUMBER: _ClassVar[int]
    OTHER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    blocks_held: int
    blocks_rising: int
    other_instance: str
    def __init__(self, blocks_held: _Optional[int] = ..., blocks_rising: _Optional[int] = ..., other_instance: _Optional[str] = ...) -> None: ...

class RetainRequest(_message.Message):
    __slots__ = ("keys", "retention", "keep_ms", "budget_bytes", "owner")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    KEEP_MS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    retention: _common_pb2.RetentionClass
    keep_ms: int
    budget_bytes: int
    owner: bytes
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., retention: _Optional[_Union[_common_pb2.RetentionClass, str]] = ..., keep_ms: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., owner: _Optional[bytes] = ...) -> None: ...

class RetainResponse(_message.Message):
    __slots__ = ("retained", "bytes")
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    retained: int
    bytes: int
    def __init__(self, retained: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class SegmentHeader(_message.Message):
    __slots__ = ("kind", "key", "parent_key", "model_revision", "layout_fingerprint", "token_ids", "extents", "stored_at_ms", "retention")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    kind: RecordKind
    key: bytes
    parent_key: bytes
    model_revision: str
    layout_fingerprint: str
    token_ids: bytes
    extents: _common_pb2.ExtentList
    stored_at_ms: int
    retention: _common_pb2.RetentionClass
    def __init__(self, kind: _Optional[_Union[RecordKind, str]] = ..., key: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., model_revision: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., extents: _Optional[_Union[_common_pb2.ExtentList, _Mapping]] = ..., stored_at_ms: _Optional[int] = ..., retention: _Optional[_Union[_common_pb2.RetentionClass, str]] = ...) -> None: ...
