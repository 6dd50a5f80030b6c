"""Between protobuf and the dataclasses of fabric. Knows both sides' fields and no service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from fabric.records import Extent, Landing, LinkAddress
from fabric.retention import RetentionClass
from protos.deepinfer.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """What a failed call says beyond its status."""

    code: str
    message: str
    field: str = ""
    fix: str = ""
    retryable: bool = False
    retry_after_s: float | None = None
    request_id: str = ""


def pack_error(detail: ErrorDetail) -> pb.ErrorDetail:
    return pb.ErrorDetail(
        code=detail.code,
        message=detail.message,
        field=detail.field,
        fix=detail.fix,
        retryable=detail.retryable,
        retry_after_ms=round((detail.retry_after_s or 0.0) * 1000),
        request_id=detail.request_id,
    )


def unpack_error(message: pb.ErrorDetail) -> ErrorDetail:
    return ErrorDetail(
        code=message.code,
        message=message.message,
        field=message.field,
        fix=message.fix,
        retryable=message.retryable,
        retry_after_s=message.retry_after_ms / 1000 if message.retry_after_ms else None,
        request_id=message.request_id,
    )


def dump_error(detail: ErrorDetail) -> bytes:
    return pack_error(detail).SerializeToString()


def load_error(packed: bytes) -> ErrorDetail | None:
    """The detail, or None where the bytes are not one: a damaged detail must not hide the error itself."""
    try:
        return unpack_error(pb.ErrorDetail.FromString(packed))
    except DecodeError:
        return None


def pack_address(address: LinkAddress) -> pb.LinkAddress:
    return pb.LinkAddress(url=address.url, peer=address.peer, epoch=address.epoch, metadata=address.metadata)


def unpack_address(message: pb.LinkAddress) -> LinkAddress:
    return LinkAddress(message.url, message.peer, message.epoch, message.metadata)


def pack_landing(landing: Landing) -> pb.Landing:
    return pb.Landing(
        id=landing.id,
        address=pack_address(landing.address),
        region=landing.region,
        offset=landing.offset,
        size=landing.size,
        lent_bytes=landing.lent_bytes,
    )


def unpack_landing(message: pb.Landing) -> Landing:
    address = unpack_address(message.address)
    return Landing(message.id, address, message.region, message.offset, message.size, message.lent_bytes)


def pack_extents(extents: Sequence[Extent]) -> pb.ExtentList:
    return pb.ExtentList(
        extents=[
            pb.Extent(
                group=extent.group,
                block=extent.block,
                valid_entries=extent.valid_entries,
                offset=extent.offset,
                size=extent.size,
                digest=extent.digest,
            )
            for extent in extents
        ]
    )


def unpack_extents(message: pb.ExtentList) -> tuple[Extent, ...]:
    return tuple(
        Extent(item.group, item.block, item.valid_entries, item.offset, item.size, item.digest)
        for item in message.extents
    )


_RETENTIONS = {
    pb.RETENTION_CLASS_DEFAULT: RetentionClass.DEFAULT,
    pb.RETENTION_CLASS_CHAT: RetentionClass.CHAT,
    pb.RETENTION_CLASS_AGENT: RetentionClass.AGENT,
}
_RETENTION_CODES = {retention: code for code, retention in _RETENTIONS.items()}


def pack_retention(retention: RetentionClass) -> pb.RetentionClass:
    return _RETENTION_CODES[retention]


def unpack_retention(code: pb.RetentionClass) -> RetentionClass | None:
    """None where it is unspecified. Raises ValueError for a class that does not exist."""
    if code == pb.RETENTION_CLASS_UNSPECIFIED:
        return None
    if code not in _RETENTIONS:
        raise ValueError(f"there is no retention class {code}")
    return _RETENTIONS[code]


class GroupLike(Protocol):
    """What a cache group declares, as the engine's layout spells it."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def entries(self) -> int: ...
    @property
    def tokens_per_entry(self) -> int: ...
    @property
    def record_bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def record_version(self) -> str: ...


class ReplayLike(Protocol):
    """What a layout says of windows after a hit; 0 tokens: nothing is computed again."""

    @property
    def tokens(self) -> int: ...
    @property
    def decoder(self) -> bool: ...
    @property
    def handoff(self) -> bool: ...
    @property
    def stacked(self) -> bool: ...


class LayoutLike(Protocol):
    """What a layout declares."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def records_fingerprint(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def max_rollback(self) -> int: ...
    @property
    def groups(self) -> Sequence[GroupLike]: ...
    @property
    def replay(self) -> ReplayLike: ...


_KINDS = {"global": pb.CACHE_GROUP_KIND_GLOBAL, "window": pb.CACHE_GROUP_KIND_WINDOW}


def pack_layout(layout: LayoutLike) -> pb.Layout:
    replay = layout.replay
    policy = pb.ReplayPolicy(
        tokens=replay.tokens, decoder=replay.decoder, handoff=replay.handoff, stacked=replay.stacked
    )
    return pb.Layout(
        fingerprint=layout.fingerprint,
        records_fingerprint=layout.records_fingerprint,
        block_tokens=layout.block_tokens,
        max_rollback=layout.max_rollback,
        groups=[_pack_group(group) for group in layout.groups],
        replay=policy if replay.tokens else None,
    )


def _pack_group(group: GroupLike) -> pb.CacheGroup:
    return pb.CacheGroup(
        name=group.name,
        kind=_KINDS[group.kind],
        layers=group.layers,
        entries=group.entries,
        tokens_per_entry=group.tokens_per_entry,
        record_bytes=group.record_bytes,
        dtype=group.dtype,
        record_version=group.record_version,
    )
