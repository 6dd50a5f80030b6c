from protos.deepinfer.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillServiceInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillServiceInfoResponse(_message.Message):
    __slots__ = ("model", "instance", "epoch", "max_prompt_tokens", "chunk_tokens", "transport_lane", "kernels")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_LANE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    instance: str
    epoch: int
    max_prompt_tokens: int
    chunk_tokens: int
    transport_lane: str
    kernels: str
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., instance: _Optional[str] = ..., epoch: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., transport_lane: _Optional[str] = ..., kernels: _Optional[str] = ...) -> None: ...

class PrefillServiceWatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillServiceWatchResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _common_pb2.WorkerStatus
    def __init__(self, status: _Optional[_Union[_common_pb2.WorkerStatus, _Mapping]] = ...) -> None: ...

class PrefillServicePrefetchRequest(_message.Message):
    __slots__ = ("token_ids", "salt", "scope")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: bytes
    scope: _common_pb2.CacheScope
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[bytes] = ..., scope: _Optional[_Union[_common_pb2.CacheScope, _Mapping]] = ...) -> None: ...

class PrefillServicePrefetchResponse(_message.Message):
    __slots__ = ("held_tokens", "rising_tokens")
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RISING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    rising_tokens: int
    def __init__(self, held_tokens: _Optional[int] = ..., rising_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("start", "attach", "cancel")
    START_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    attach: PrefillAttach
    cancel: PrefillCancel
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., attach: _Optional[_Union[PrefillAttach, _Mapping]] = ..., cancel: _Optional[_Union[PrefillCancel, _Mapping]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "salt", "use_cache", "emitted_tokens", "scope")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    USE_CACHE_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    salt: bytes
    use_cache: bool
    emitted_tokens: int
    scope: _common_pb2.CacheScope
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., salt: _Optional[bytes] = ..., use_cache: _Optional[bool] = ..., emitted_tokens: _Optional[int] = ..., scope: _Optional[_Union[_common_pb2.CacheScope, _Mapping]] = ...) -> None: ...

class PrefillAttach(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _common_pb2.Ticket
    def __init__(self, ticket: _Optional[_Union[_common_pb2.Ticket, _Mapping]] = ...) -> None: ...

class PrefillCancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("queued", "started", "chunk", "done")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    queued: PrefillQueued
    started: PrefillStarted
    chunk: PrefillChunk
    done: PrefillDone
    def __init__(self, queued: _Optional[_Union[PrefillQueued, _Mapping]] = ..., started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., chunk: _Optional[_Union[PrefillChunk, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillQueued(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: int
    def __init__(self, position: _Optional[int] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillChunk(_message.Message):
    __slots__ = ("computed_tokens", "pushed_tokens")
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PUSHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    pushed_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ..., pushed_tokens: _Optional[int] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("receipt", "usage", "prompt_logprobs")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    receipt: _common_pb2.Receipt
    usage: _common_pb2.Usage
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    def __init__(self, receipt: _Optional[_Union[_common_pb2.Receipt, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...
