"""Between protobuf and what an operator asks for. Knows both sides' fields and decides nothing."""

from __future__ import annotations

import re

import numpy as np

from fabric import wire
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import kvstore_admin_pb2 as pb
from protos.deepinfer.v1 import kvstore_pb2 as store
from services.kvstore.catalog import Description, Entry, Filter
from services.kvstore.index import Tier
from services.kvstore.nvme.format import Stored
from services.kvstore.records import Record, RecordKind
from services.kvstore.upkeep import Progress

_HEX = re.compile(r"[0-9a-f]{0,64}")
_KINDS = {store.RECORD_KIND_BLOCK: RecordKind.BLOCK, store.RECORD_KIND_ANCHOR: RecordKind.ANCHOR}
_KIND_CODES = {kind: code for code, kind in _KINDS.items()}
_TIERS = {pb.RECORD_TIER_DRAM: Tier.DRAM, pb.RECORD_TIER_NVME: Tier.NVME}
TIER_CODES = {tier: code for code, tier in _TIERS.items()}


def unpack_filter(message: pb.RecordFilter) -> Filter:
    """Raises InvalidArgument for digits that are none, or a kind, tier or class that does not exist."""
    for field, text in (("key_prefix", message.key_prefix), ("owner", message.owner)):
        if _HEX.fullmatch(text) is None:
            raise InvalidArgument(f"{text!r}", field=f"filter.{field}", fix="send lowercase hexadecimal digits")
    try:
        return Filter(
            message.key_prefix,
            _KINDS[message.kind] if message.kind else None,
            _TIERS[message.tier] if message.tier else None,
            wire.unpack_retention(message.retention),
            message.owner,
            message.idle_ms / 1000,
        )
    except (KeyError, ValueError) as error:
        raise InvalidArgument(
            f"{error} is none", field="filter", fix="send a kind, tier and class that exist"
        ) from error


def pack_entry(entry: Entry, description: Description | None, now: float) -> pb.RecordEntry:
    """`description` only where tokens were asked for; `now` in unix seconds."""
    message = pb.RecordEntry(
        kind=_KIND_CODES[entry.id.kind],
        key=entry.id.key,
        tiers=[TIER_CODES[tier] for tier in entry.tiers],
        size=entry.size,
        idle_ms=round(entry.idle_s * 1000),
        owner=entry.owner,
        retention=wire.pack_retention(entry.retention),
    )
    age_s = entry.age_s
    if description is not None:
        message.token_ids.extend(_tokens(description.record))
        message.parent_key = description.record.parent
        age_s = max(0.0, now - description.stored_at) if description.stored_at is not None else age_s
    if age_s is not None:
        message.age_ms = round(age_s * 1000)
    return message


def pack_verified(progress: Progress) -> pb.VerifyRecordsResponse:
    damaged = [
        pb.Damage(kind=_KIND_CODES[each.id.kind], key=each.id.key, tier=TIER_CODES[each.tier])
        for each in progress.damaged
    ]
    return pb.VerifyRecordsResponse(
        records=progress.records, bytes=progress.bytes, total=progress.total, damaged=damaged
    )


def pack_record(record: Record | Stored) -> pb.PrefixRecord:
    return pb.PrefixRecord(
        kind=_KIND_CODES[record.id.kind],
        name=store.BlockName(key=record.id.key, token_ids=_tokens(record)),
        parent_key=record.parent,
        size=record.size,
        extents=wire.pack_extents(record.extents),
    )


def _tokens(record: Record | Stored) -> list[int]:
    tokens: list[int] = np.frombuffer(record.tokens, dtype="<u4").tolist()
    return tokens
