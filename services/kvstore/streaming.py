"""Streaming: the records of one read, part by part: later ones come up from the disk while earlier ones are sent.

What comes up is verified on the way; what is in DRAM was, and is verified again by its reader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from services.kvstore.records import BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.tiers import Tiers

PART_BYTES = 8 << 20
_IN_FLIGHT = 4  # parts that are brought up or wait for their turn
# No part is larger than one of so many of DRAM, for a few reads at a time must find room; one that is there needs none.
_SHARES, _HELD_SHARES = 16, 4


@dataclass(frozen=True, slots=True)
class Part:
    """Records in order. What is not `whole` is the last one: the record that should follow has left or is damaged, or
    DRAM has no room for it."""

    records: tuple[Record, ...]
    whole: bool


async def stream(
    tiers: Tiers, names: Sequence[BlockName], identity: Identity, anchor: bool, part_bytes: int = PART_BYTES
) -> AsyncGenerator[Part, None]:
    """The blocks of `names` and, with `anchor`, the last one's anchor; close it when it is not read to its end.

    The bytes of a part stay in place until the next one is asked for. What is in DRAM alone stays until its turn: what
    comes up makes no room at the cost of what could not come up again.
    """
    parts, held_parts = _cut(tiers, names, min(part_bytes, tiers.dram.capacity // _SHARES))
    pins = [ExitStack() for _ in parts]
    ahead: deque[asyncio.Task[Part]] = deque()
    try:
        for part, held in zip(parts, pins, strict=True):
            held.enter_context(tiers.dram.pinned(tiers.only_warm(part, identity, anchor and part is parts[-1])))
        for at in range(len(parts)):
            most = (
                _IN_FLIGHT if held_parts - at <= 1 else 1
            )  # what is there already is kept in place one part at a time
            for next_ in range(at + len(ahead), min(at + most, len(parts))):
                wants_anchor = anchor and next_ == len(parts) - 1
                ready = _ready(tiers, parts[next_], identity, wants_anchor, pins[next_])
                ahead.append(asyncio.ensure_future(ready))
            part_ready = await ahead[0]
            ahead.popleft()
            yield part_ready
            pins[at].close()
            if not part_ready.whole:
                return
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
        for held in pins:
            held.close()


async def _ready(tiers: Tiers, names: Sequence[BlockName], identity: Identity, anchor: bool, held: ExitStack) -> Part:
    """Brings a part up, and keeps it in place."""
    await tiers.raise_(names, identity, anchor)
    records = tiers.collect(names, identity, anchor)
    held.enter_context(tiers.dram.pinned(records))
    return Part(tuple(records), len(records) == len(names) + anchor)


def _cut(tiers: Tiers, names: Sequence[BlockName], part_bytes: int) -> tuple[list[Sequence[BlockName]], int]:
    """What is in DRAM at the start, in so many parts, then parts of so many blocks as fit into `part_bytes`: all blocks
    of a prefix are as large as its first one."""
    size = tiers.size_of(RecordKind.BLOCK, names[0]) if names else None
    if not size:
        return [names] if names else [], 0
    held, most = _held(tiers, names), max(1, tiers.dram.capacity // _HELD_SHARES // size)
    count = max(1, part_bytes // size)
    first = [names[start : min(start + most, held)] for start in range(0, held, most)]
    return first + [names[start : start + count] for start in range(held, len(names), count)], len(first)


def _held(tiers: Tiers, names: Sequence[BlockName]) -> int:
    """Leading blocks in DRAM."""
    found = (
        index for index, name in enumerate(names) if tiers.dram.by_id(RecordId(RecordKind.BLOCK, name.key)) is None
    )
    return next(found, len(names))
