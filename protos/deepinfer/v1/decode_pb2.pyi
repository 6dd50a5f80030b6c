from protos.deepinfer.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WriterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITER_STATE_UNSPECIFIED: _ClassVar[WriterState]
    WRITER_STATE_FINISHED: _ClassVar[WriterState]
    WRITER_STATE_UNKNOWN: _ClassVar[WriterState]
    WRITER_STATE_NEVER_STARTED: _ClassVar[WriterState]
WRITER_STATE_UNSPECIFIED: WriterState
WRITER_STATE_FINISHED: WriterState
WRITER_STATE_UNKNOWN: WriterState
WRITER_STATE_NEVER_STARTED: WriterState

class DecodeServiceInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeServiceInfoResponse(_message.Message):
    __slots__ = ("model", "instance", "epoch", "max_total_tokens", "max_sequences", "lease_ms", "landing_bytes", "transport_lane", "kernels")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    LANDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_LANE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    instance: str
    epoch: int
    max_total_tokens: int
    max_sequences: int
    lease_ms: int
    landing_bytes: int
    transport_lane: str
    kernels: str
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., lease_ms: _Optional[int] = ..., landing_bytes: _Optional[int] = ..., transport_lane: _Optional[str] = ..., kernels: _Optional[str] = ...) -> None: ...

class DecodeServiceWatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeServiceWatchResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.WorkerStatus
    def __init__(self, status: _Optional[_Union[_common_pb2.WorkerStatus, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "max_total_tokens", "salt", "layout", "model_revision", "use_cache", "writer", "epoch", "scope")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    USE_CACHE_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_total_tokens: int
    salt: bytes
    layout: _common_pb2.Layout
    model_revision: str
    use_cache: bool
    writer: _common_pb2.Incarnation
    epoch: int
    scope: _common_pb2.CacheScope
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_total_tokens: _Optional[int] = ..., salt: _Optional[bytes] = ..., layout: _Optional[_Union[_common_pb2.Layout, _Mapping]] = ..., model_revision: _Optional[str] = ..., use_cache: _Optional[bool] = ..., writer: _Optional[_Union[_common_pb2.Incarnation, _Mapping]] = ..., epoch: _Optional[int] = ..., scope: _Optional[_Union[_common_pb2.CacheScope, _Mapping]] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ...) -> None: ...

class DecodeServiceGenerateRequest(_message.Message):
    __slots__ = ("ticket_id", "request_id", "token_ids", "sampling", "receipt", "emitted_tokens", "gather_ms")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GATHER_MS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    receipt: _common_pb2.Receipt
    emitted_tokens: int
    gather_ms: int
    def __init__(self, ticket_id: _Optional[str] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., receipt: _Optional[_Union[_common_pb2.Receipt, _Mapping]] = ..., emitted_tokens: _Optional[int] = ..., gather_ms: _Optional[int] = ...) -> None: ...

class DecodeServiceGenerateResponse(_message.Message):
    __slots__ = ("first_index", "token_ids", "logprobs", "finish")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    finish: DecodeFinish
    def __init__(self, first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., finish: _Optional[_Union[DecodeFinish, _Mapping]] = ...) -> None: ...

class DecodeFinish(_message.Message):
    __slots__ = ("reason", "stop", "completion_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.FinishReason
    stop: str
    completion_tokens: int
    def __init__(self, reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop: _Optional[str] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("ticket_id", "writer", "epoch")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    writer: WriterState
    epoch: int
    def __init__(self, ticket_id: _Optional[str] = ..., writer: _Optional[_Union[WriterState, str]] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...
