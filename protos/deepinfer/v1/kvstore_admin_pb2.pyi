from protos.deepinfer.v1 import common_pb2 as _common_pb2
from protos.deepinfer.v1 import kvstore_pb2 as _kvstore_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORD_TIER_UNSPECIFIED: _ClassVar[RecordTier]
    RECORD_TIER_DRAM: _ClassVar[RecordTier]
    RECORD_TIER_NVME: _ClassVar[RecordTier]
RECORD_TIER_UNSPECIFIED: RecordTier
RECORD_TIER_DRAM: RecordTier
RECORD_TIER_NVME: RecordTier

class RecordFilter(_message.Message):
    __slots__ = ("key_prefix", "kind", "tier", "retention", "owner", "idle_ms")
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    key_prefix: str
    kind: _kvstore_pb2.RecordKind
    tier: RecordTier
    retention: _common_pb2.RetentionClass
    owner: str
    idle_ms: int
    def __init__(self, key_prefix: _Optional[str] = ..., kind: _Optional[_Union[_kvstore_pb2.RecordKind, str]] = ..., tier: _Optional[_Union[RecordTier, str]] = ..., retention: _Optional[_Union[_common_pb2.RetentionClass, str]] = ..., owner: _Optional[str] = ..., idle_ms: _Optional[int] = ...) -> None: ...

class RecordEntry(_message.Message):
    __slots__ = ("kind", "key", "tiers", "size", "age_ms", "idle_ms", "retention", "owner", "token_ids", "parent_key", "prefix")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    kind: _kvstore_pb2.RecordKind
    key: bytes
    tiers: _containers.RepeatedScalarFieldContainer[RecordTier]
    size: int
    age_ms: int
    idle_ms: int
    retention: _common_pb2.RetentionClass
    owner: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parent_key: bytes
    prefix: PrefixSize
    def __init__(self, kind: _Optional[_Union[_kvstore_pb2.RecordKind, str]] = ..., key: _Optional[bytes] = ..., tiers: _Optional[_Iterable[_Union[RecordTier, str]]] = ..., size: _Optional[int] = ..., age_ms: _Optional[int] = ..., idle_ms: _Optional[int] = ..., retention: _Optional[_Union[_common_pb2.RetentionClass, str]] = ..., owner: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., parent_key: _Optional[bytes] = ..., prefix: _Optional[_Union[PrefixSize, _Mapping]] = ...) -> None: ...

class PrefixSize(_message.Message):
    __slots__ = ("blocks", "bytes", "cut")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    cut: bool
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., cut: _Optional[bool] = ...) -> None: ...

class ListRecordsRequest(_message.Message):
    __slots__ = ("filter", "limit", "with_tokens", "ends")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WITH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    filter: RecordFilter
    limit: int
    with_tokens: bool
    ends: bool
    def __init__(self, filter: _Optional[_Union[RecordFilter, _Mapping]] = ..., limit: _Optional[int] = ..., with_tokens: _Optional[bool] = ..., ends: _Optional[bool] = ...) -> None: ...

class ListRecordsResponse(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RecordEntry]
    def __init__(self, records: _Optional[_Iterable[_Union[RecordEntry, _Mapping]]] = ...) -> None: ...

class ReadCountsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadCountsResponse(_message.Message):
    __slots__ = ("instance", "epoch", "uptime_ms", "transport", "tiers", "hits", "hit_blocks", "misses", "corrupt", "rejected", "index_lost", "promised_bytes")
    class MissesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    INDEX_LOST_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BYTES_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    uptime_ms: int
    transport: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierCounts]
    hits: int
    hit_blocks: int
    misses: _containers.ScalarMap[str, int]
    corrupt: int
    rejected: int
    index_lost: int
    promised_bytes: int
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., transport: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierCounts, _Mapping]]] = ..., hits: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., misses: _Optional[_Mapping[str, int]] = ..., corrupt: _Optional[int] = ..., rejected: _Optional[int] = ..., index_lost: _Optional[int] = ..., promised_bytes: _Optional[int] = ...) -> None: ...

class TierCounts(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "records", "queued", "events")
    class EventsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    tier: RecordTier
    capacity_bytes: int
    used_bytes: int
    records: int
    queued: int
    events: _containers.ScalarMap[str, int]
    def __init__(self, tier: _Optional[_Union[RecordTier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., records: _Optional[int] = ..., queued: _Optional[int] = ..., events: _Optional[_Mapping[str, int]] = ...) -> None: ...

class VerifyRecordsRequest(_message.Message):
    __slots__ = ("filter",)
    FILTER_FIELD_NUMBER: _ClassVar[int]
    filter: RecordFilter
    def __init__(self, filter: _Optional[_Union[RecordFilter, _Mapping]] = ...) -> None: ...

class VerifyRecordsResponse(_message.Message):
    __slots__ = ("records", "bytes", "total", "damaged")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    records: int
    bytes: int
    total: int
    damaged: _containers.RepeatedCompositeFieldContainer[Damage]
    def __init__(self, records: _Optional[int] = ..., bytes: _Optional[int] = ..., total: _Optional[int] = ..., damaged: _Optional[_Iterable[_Union[Damage, _Mapping]]] = ...) -> None: ...

class Damage(_message.Message):
    __slots__ = ("kind", "key", "tier")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    kind: _kvstore_pb2.RecordKind
    key: bytes
    tier: RecordTier
    def __init__(self, kind: _Optional[_Union[_kvstore_pb2.RecordKind, str]] = ..., key: _Optional[bytes] = ..., tier: _Optional[_Union[RecordTier, str]] = ...) -> None: ...

class EvictRecordsRequest(_message.Message):
    __slots__ = ("filter", "execute")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_FIELD_NUMBER: _ClassVar[int]
    filter: RecordFilter
    execute: bool
    def __init__(self, filter: _Optional[_Union[RecordFilter, _Mapping]] = ..., execute: _Optional[bool] = ...) -> None: ...

class EvictRecordsResponse(_message.Message):
    __slots__ = ("records", "bytes")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    records: int
    bytes: int
    def __init__(self, records: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ReadPrefixRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class ReadPrefixResponse(_message.Message):
    __slots__ = ("records", "model_revision", "layout_fingerprint")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[PrefixRecord]
    model_revision: str
    layout_fingerprint: str
    def __init__(self, records: _Optional[_Iterable[_Union[PrefixRecord, _Mapping]]] = ..., model_revision: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ...) -> None: ...

class PrefixRecord(_message.Message):
    __slots__ = ("kind", "name", "parent_key", "size", "extents")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    kind: _kvstore_pb2.RecordKind
    name: _kvstore_pb2.BlockName
    parent_key: bytes
    size: int
    extents: _common_pb2.ExtentList
    def __init__(self, kind: _Optional[_Union[_kvstore_pb2.RecordKind, str]] = ..., name: _Optional[_Union[_kvstore_pb2.BlockName, _Mapping]] = ..., parent_key: _Optional[bytes] = ..., size: _Optional[int] = ..., extents: _Optional[_Union[_common_pb2.ExtentList, _Mapping]] = ...) -> None: ...
