"""Pairing: whether KV that one worker writes can be used by another one. Knows layouts; asks nobody."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layout import CacheGroup, GroupKind, Layout
from fabric.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Records:
    """What a worker writes or reads: of which weights, and in which layout."""

    model_revision: str
    layout: Layout


def require_pair(prefill: Records, decode: Records) -> None:
    """Records are the same on both sides; how many tokens a block has is each side's own affair.

    Raises:
        InvalidArgument: they serve other weights, or write and read other records; tells both.
    """
    if prefill.model_revision != decode.model_revision:
        raise _misfit("model_revision", f"revision {prefill.model_revision!r}", f"revision {decode.model_revision!r}")
    if prefill.layout.records_fingerprint == decode.layout.records_fingerprint:
        return
    for written, read in zip(prefill.layout.groups, decode.layout.groups, strict=False):
        if written.unpaged != read.unpaged:
            raise _misfit("layout", _told(written), _told(read))
    raise _misfit("layout", _whole(prefill.layout), _whole(decode.layout))


def _told(group: CacheGroup) -> str:
    records = f"{group.layers} layers of {group.record_bytes}-byte {group.dtype} records"
    window = f", window of {group.entries}" if group.kind is GroupKind.WINDOW else ""
    return f"{group.name} ({records}, one for {group.tokens_per_entry} tokens, version {group.record_version}{window})"


def _whole(layout: Layout) -> str:
    names = ", ".join(group.name for group in layout.groups)
    return f"groups {names} and {layout.replay}"


def _misfit(field: str, prefill: str, decode: str) -> InvalidArgument:
    return InvalidArgument(
        f"prefill has {prefill}, decode has {decode}",
        field=field,
        fix="pair workers that serve the same weights in the same records",
    )
