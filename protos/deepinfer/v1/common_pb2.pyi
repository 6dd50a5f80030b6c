from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DigestKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIGEST_KIND_UNSPECIFIED: _ClassVar[DigestKind]
    DIGEST_KIND_XXH3_64: _ClassVar[DigestKind]
    DIGEST_KIND_LEAF_TREE: _ClassVar[DigestKind]

class CacheGroupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_GROUP_KIND_UNSPECIFIED: _ClassVar[CacheGroupKind]
    CACHE_GROUP_KIND_GLOBAL: _ClassVar[CacheGroupKind]
    CACHE_GROUP_KIND_WINDOW: _ClassVar[CacheGroupKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class RetentionClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETENTION_CLASS_UNSPECIFIED: _ClassVar[RetentionClass]
    RETENTION_CLASS_DEFAULT: _ClassVar[RetentionClass]
    RETENTION_CLASS_CHAT: _ClassVar[RetentionClass]
    RETENTION_CLASS_AGENT: _ClassVar[RetentionClass]
DIGEST_KIND_UNSPECIFIED: DigestKind
DIGEST_KIND_XXH3_64: DigestKind
DIGEST_KIND_LEAF_TREE: DigestKind
CACHE_GROUP_KIND_UNSPECIFIED: CacheGroupKind
CACHE_GROUP_KIND_GLOBAL: CacheGroupKind
CACHE_GROUP_KIND_WINDOW: CacheGroupKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_CANCELLED: FinishReason
RETENTION_CLASS_UNSPECIFIED: RetentionClass
RETENTION_CLASS_DEFAULT: RetentionClass
RETENTION_CLASS_CHAT: RetentionClass
RETENTION_CLASS_AGENT: RetentionClass

class CacheGroup(_message.Message):
    __slots__ = ("name", "kind", "layers", "entries", "tokens_per_entry", "record_bytes", "dtype", "record_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_ENTRY_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RECORD_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: CacheGroupKind
    layers: int
    entries: int
    tokens_per_entry: int
    record_bytes: int
    dtype: str
    record_version: str
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[CacheGroupKind, str]] = ..., layers: _Optional[int] = ..., entries: _Optional[int] = ..., tokens_per_entry: _Optional[int] = ..., record_bytes: _Optional[int] = ..., dtype: _Optional[str] = ..., record_version: _Optional[str] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("fingerprint", "block_tokens", "max_rollback", "groups", "replay", "records_fingerprint")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    block_tokens: int
    max_rollback: int
    groups: _containers.RepeatedCompositeFieldContainer[CacheGroup]
    replay: ReplayPolicy
    records_fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ..., block_tokens: _Optional[int] = ..., max_rollback: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[CacheGroup, _Mapping]]] = ..., replay: _Optional[_Union[ReplayPolicy, _Mapping]] = ..., records_fingerprint: _Optional[str] = ...) -> None: ...

class ReplayPolicy(_message.Message):
    __slots__ = ("tokens", "decoder", "handoff", "stacked")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    STACKED_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    decoder: bool
    handoff: bool
    stacked: bool
    def __init__(self, tokens: _Optional[int] = ..., decoder: _Optional[bool] = ..., handoff: _Optional[bool] = ..., stacked: _Optional[bool] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "revision", "family", "vocab_size", "max_context_tokens", "eos_token_ids", "layout")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    family: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    layout: Layout
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., family: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class SamplingState(_message.Message):
    __slots__ = ("seed", "emitted_tokens")
    SEED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    emitted_tokens: int
    def __init__(self, seed: _Optional[int] = ..., emitted_tokens: _Optional[int] = ...) -> None: ...

class TokenAlternative(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "alternatives")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    alternatives: _containers.RepeatedCompositeFieldContainer[TokenAlternative]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., alternatives: _Optional[_Iterable[_Union[TokenAlternative, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ...) -> None: ...

class LinkAddress(_message.Message):
    __slots__ = ("url", "peer", "epoch", "metadata")
    URL_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    url: str
    peer: str
    epoch: int
    metadata: bytes
    def __init__(self, url: _Optional[str] = ..., peer: _Optional[str] = ..., epoch: _Optional[int] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class Landing(_message.Message):
    __slots__ = ("id", "address", "region", "offset", "size", "lent_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    address: LinkAddress
    region: bytes
    offset: int
    size: int
    lent_bytes: int
    def __init__(self, id: _Optional[str] = ..., address: _Optional[_Union[LinkAddress, _Mapping]] = ..., region: _Optional[bytes] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., lent_bytes: _Optional[int] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("group", "block", "valid_entries", "offset", "size", "digest")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    VALID_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    group: str
    block: int
    valid_entries: int
    offset: int
    size: int
    digest: int
    def __init__(self, group: _Optional[str] = ..., block: _Optional[int] = ..., valid_entries: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Incarnation(_message.Message):
    __slots__ = ("instance", "epoch", "process")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    process: str
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., process: _Optional[str] = ...) -> None: ...

class CacheScope(_message.Message):
    __slots__ = ("owner", "retention", "region_tokens", "region_salt")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    REGION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REGION_SALT_FIELD_NUMBER: _ClassVar[int]
    owner: bytes
    retention: RetentionClass
    region_tokens: int
    region_salt: bytes
    def __init__(self, owner: _Optional[bytes] = ..., retention: _Optional[_Union[RetentionClass, str]] = ..., region_tokens: _Optional[int] = ..., region_salt: _Optional[bytes] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("id", "request_id", "epoch", "lease_ms", "landings", "layout", "model_revision", "held_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    LANDINGS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: str
    request_id: str
    epoch: int
    lease_ms: int
    landings: _containers.RepeatedCompositeFieldContainer[Landing]
    layout: Layout
    model_revision: str
    held_tokens: int
    def __init__(self, id: _Optional[str] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_ms: _Optional[int] = ..., landings: _Optional[_Iterable[_Union[Landing, _Mapping]]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., model_revision: _Optional[str] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("ticket_id", "request_id", "epoch", "model_revision", "layout_fingerprint", "digest_kind", "tokens", "extents", "first_token", "replay_from")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_KIND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FROM_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    request_id: str
    epoch: int
    model_revision: str
    layout_fingerprint: str
    digest_kind: DigestKind
    tokens: int
    extents: _containers.RepeatedCompositeFieldContainer[ExtentList]
    first_token: FirstToken
    replay_from: ReplayFrom
    def __init__(self, ticket_id: _Optional[str] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model_revision: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., digest_kind: _Optional[_Union[DigestKind, str]] = ..., tokens: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[ExtentList, _Mapping]]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., replay_from: _Optional[_Union[ReplayFrom, _Mapping]] = ...) -> None: ...

class ExtentList(_message.Message):
    __slots__ = ("extents",)
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "state", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    state: SamplingState
    logprob: TokenLogprob
    def __init__(self, token_id: _Optional[int] = ..., state: _Optional[_Union[SamplingState, _Mapping]] = ..., logprob: _Optional[_Union[TokenLogprob, _Mapping]] = ...) -> None: ...

class ReplayFrom(_message.Message):
    __slots__ = ("position", "state")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    position: int
    state: SamplingState
    def __init__(self, position: _Optional[int] = ..., state: _Optional[_Union[SamplingState, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("instance", "epoch", "sequence", "running_requests", "waiting_requests", "queued_tokens", "blocks_total", "blocks_free", "steps", "draining", "keys_added", "keys_removed", "keys_reset", "keys_version", "keys_base")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KEYS_ADDED_FIELD_NUMBER: _ClassVar[int]
    KEYS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    KEYS_RESET_FIELD_NUMBER: _ClassVar[int]
    KEYS_VERSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_BASE_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    sequence: int
    running_requests: int
    waiting_requests: int
    queued_tokens: int
    blocks_total: int
    blocks_free: int
    steps: int
    draining: bool
    keys_added: _containers.RepeatedScalarFieldContainer[bytes]
    keys_removed: _containers.RepeatedScalarFieldContainer[bytes]
    keys_reset: bool
    keys_version: int
    keys_base: int
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., steps: _Optional[int] = ..., draining: _Optional[bool] = ..., keys_added: _Optional[_Iterable[bytes]] = ..., keys_removed: _Optional[_Iterable[bytes]] = ..., keys_reset: _Optional[bool] = ..., keys_version: _Optional[int] = ..., keys_base: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "field", "fix", "retryable", "retry_after_ms", "request_id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    FIX_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    field: str
    fix: str
    retryable: bool
    retry_after_ms: int
    request_id: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., fix: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...
