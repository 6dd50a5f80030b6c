"""Layouts from protobuf, trusted only after their fingerprint was computed anew. Knows no engine and no tensors."""

from __future__ import annotations

from engine.layout import CacheGroup, GroupKind, Layout, ReplayPolicy
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import common_pb2 as pb

_KINDS = {pb.CACHE_GROUP_KIND_GLOBAL: GroupKind.GLOBAL, pb.CACHE_GROUP_KIND_WINDOW: GroupKind.WINDOW}


def unpack_layout(message: pb.Layout, field: str) -> Layout:
    """The layout, its fingerprint computed anew.

    Raises:
        InvalidArgument: a group no layout can have, or a fingerprint that is not this layout's.
    """
    try:
        groups = tuple(_unpack_group(group) for group in message.groups)
        layout = Layout(message.block_tokens, message.max_rollback, groups, unpack_replay(message.replay))
    except (ValueError, KeyError) as error:
        raise InvalidArgument(str(error), field=field, fix="send the layout that Info tells") from error
    if layout.fingerprint != message.fingerprint:
        raise InvalidArgument(
            f"the layout's fingerprint is {layout.fingerprint}, {message.fingerprint!r} was sent",
            field=f"{field}.fingerprint",
            fix="send the layout that Info tells",
        )
    return layout


def unpack_replay(message: pb.ReplayPolicy) -> ReplayPolicy:
    """The policy of a layout's windows. Raises ValueError for one that no layout can have."""
    return ReplayPolicy(message.tokens, message.decoder, message.handoff, message.stacked)


def _unpack_group(group: pb.CacheGroup) -> CacheGroup:
    return CacheGroup(
        name=group.name,
        kind=_KINDS[group.kind],
        layers=group.layers,
        entries=group.entries,
        tokens_per_entry=group.tokens_per_entry,
        record_bytes=group.record_bytes,
        dtype=group.dtype,
        record_version=group.record_version,
    )
