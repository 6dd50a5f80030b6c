"""How records and counts of a kvstore read on a terminal. Knows messages and widths, asks nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from cli.console import megabytes, seconds
from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_admin_pb2 as pb
from protos.deepinfer.v1 import kvstore_pb2 as store

KINDS = {"block": store.RECORD_KIND_BLOCK, "anchor": store.RECORD_KIND_ANCHOR}
TIERS = {"dram": pb.RECORD_TIER_DRAM, "nvme": pb.RECORD_TIER_NVME}
CLASSES = {
    "default": common.RETENTION_CLASS_DEFAULT,
    "chat": common.RETENTION_CLASS_CHAT,
    "agent": common.RETENTION_CLASS_AGENT,
}
HEADING = f"{'key':<16}  {'kind':<6}  {'tier':<9}  {'bytes':>12}  {'class':<7}  {'owner':<8}  {'age':>10}  {'idle':>10}"
_SHORT, _SHORT_OWNER = 16, 8
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_LONG_S = 48 * 3600.0


def record(entry: pb.RecordEntry, full: bool) -> str:
    """One line; `full`: all digits of the key. Token ids, where they came along, on a line of their own."""
    key, tiers = entry.key.hex(), "+".join(_named(TIERS, tier) for tier in entry.tiers)
    age = _age(entry.age_ms) if entry.HasField("age_ms") else "-"
    line = (
        f"{key if full else key[:_SHORT]}  {_named(KINDS, entry.kind):<6}  {tiers:<9}  {entry.size:>12,}  "
        f"{_named(CLASSES, entry.retention) or '-':<7}  {entry.owner[:_SHORT_OWNER] or '-':<8}  "
        f"{age:>10}  {_age(entry.idle_ms):>10}"
    )
    if entry.HasField("prefix"):
        cut = ", its start is missing" if entry.prefix.cut else ""
        line += f"  {_blocks(entry.prefix.blocks)}, {megabytes(entry.prefix.bytes)}{cut}"
    return line + (f"\n  tokens {' '.join(map(str, entry.token_ids))}" if entry.token_ids else "")


def as_json(entry: pb.RecordEntry, instance: str) -> str:
    """One JSON line with everything that was told."""
    told: dict[str, Any] = {
        "instance": instance,
        "key": entry.key.hex(),
        "kind": _named(KINDS, entry.kind),
        "tiers": [_named(TIERS, tier) for tier in entry.tiers],
        "bytes": entry.size,
        "class": _named(CLASSES, entry.retention) or None,
        "owner": entry.owner or None,
        "age_s": entry.age_ms / 1000 if entry.HasField("age_ms") else None,
        "idle_s": entry.idle_ms / 1000,
    }
    if entry.token_ids:
        told |= {"parent": entry.parent_key.hex(), "token_ids": list(entry.token_ids)}
    if entry.HasField("prefix"):
        prefix = entry.prefix
        told["prefix"] = {"blocks": prefix.blocks, "bytes": prefix.bytes, "cut": prefix.cut}
    return json.dumps(told)


def counts(reply: pb.ReadCountsResponse) -> Iterator[str]:
    """Lines of one instance."""
    yield f"[bold]{reply.instance}[/], up {_age(reply.uptime_ms)}, epoch {reply.epoch}, {reply.transport}"
    for tier in reply.tiers:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        line = (
            f"  {_named(TIERS, tier.tier)}  {megabytes(tier.used_bytes)} of {megabytes(tier.capacity_bytes)} "
            f"({share:.0%}), {tier.records:,} records"
        )
        yield line + (f", {tier.queued:,} wait to be written" if tier.events else "")
        if tier.events:
            yield "        " + ", ".join(f"{name} {count:,}" for name, count in sorted(tier.events.items()))
    misses = ", ".join(f"{reason} {count:,}" for reason, count in sorted(reply.misses.items())) or "none"
    yield f"  hits  {reply.hits:,}, of {reply.hit_blocks:,} blocks; misses: {misses}"
    yield (
        f"  damage  {reply.corrupt:,} found in DRAM, {reply.rejected:,} offered; "
        f"index silent {reply.index_lost:,} times; promised {megabytes(reply.promised_bytes)}"
    )


def choice(text: str, names: dict[str, Any], option: str) -> Any:
    """The code of a name, 0 for none. Raises InvalidArgument for one that does not exist."""
    if not text:
        return 0
    if text not in names:
        raise InvalidArgument(f"{text!r} is not known", field=option, fix=f"use one of {', '.join(names)}")
    return names[text]


def duration_ms(text: str, option: str) -> int:
    """A time such as 90s, 30m, 2h or 3d, in milliseconds; 0 for none. Raises InvalidArgument."""
    if not text:
        return 0
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidArgument(f"{text!r} is no time", field=option, fix="give one such as 90s, 30m, 2h or 3d")
    return round(float(found[1]) * _UNITS[found[2]] * 1000)


def digits(text: str, option: str, most: int) -> str:
    """Hexadecimal digits as they are sent. Raises InvalidArgument for anything else."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{0,{most}}}", text):
        fix = f"give at most {most} hexadecimal digits"
        raise InvalidArgument(f"{text!r} is no beginning of one", field=option, fix=fix)
    return text.lower()


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count:,} blocks"


def _named(names: dict[str, Any], code: int) -> str:
    return next((name for name, known in names.items() if known == code), "")


def _age(milliseconds: int) -> str:
    value = milliseconds / 1000
    return seconds(value) if value < _LONG_S else f"{value / 86400:.1f} d"
