"""Streaming: the records of one read, part by part: later ones come up from the disk while earlier ones are sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from services.kvstore.records import BlockName, Identity, Record, RecordKind
from services.kvstore.tiers import Tiers
from services.worker.together import settled

PART_BYTES = 8 << 20
_IN_FLIGHT = 4  # parts that are brought up, verified or wait for their turn
_SHARES = 16  # no part is larger than one of so many of DRAM: a few reads at a time must find room


@dataclass(frozen=True, slots=True)
class Part:
    """Verified records in order; `damaged` is the one after them that is not as it was sealed. What is not `whole` is
    the last one: the record that should follow has left, or DRAM has no room for it."""

    records: tuple[Record, ...]
    whole: bool
    damaged: Record | None


async def stream(
    tiers: Tiers, names: Sequence[BlockName], identity: Identity, anchor: bool, part_bytes: int = PART_BYTES
) -> AsyncGenerator[Part, None]:
    """The blocks of `names` and, with `anchor`, the last one's anchor; close it when it is not read to its end.

    The bytes of a part stay in place until the next one is asked for. What is in DRAM alone stays until its turn: what
    comes up makes no room at the cost of what could not come up again.
    """
    parts = _cut(tiers, names, min(part_bytes, tiers.dram.capacity // _SHARES))
    pins = [ExitStack() for _ in parts]
    ahead: deque[asyncio.Task[Part]] = deque()
    try:
        for part, held in zip(parts, pins, strict=True):
            held.enter_context(tiers.dram.pinned(tiers.only_warm(part, identity, anchor and part is parts[-1])))
        for at in range(len(parts)):
            for next_ in range(at + len(ahead), min(at + _IN_FLIGHT, len(parts))):
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
    """Brings a part up, keeps it in place, and verifies what was not verified on the way."""
    raised = await tiers.raise_(names, identity, anchor)
    records = tiers.collect(names, identity, anchor)
    held.enter_context(tiers.dram.pinned(records))
    unseen = [record for record in records if record.id not in raised]
    damaged = await settled(asyncio.to_thread(_first_damaged, tiers, unseen)) if unseen else None
    sound = records if damaged is None else records[: records.index(damaged)]
    return Part(tuple(sound), damaged is None and len(records) == len(names) + anchor, damaged)


def _first_damaged(tiers: Tiers, records: Sequence[Record]) -> Record | None:
    return next((record for record in records if not tiers.dram.is_intact(record)), None)


def _cut(tiers: Tiers, names: Sequence[BlockName], part_bytes: int) -> list[Sequence[BlockName]]:
    """Parts of so many blocks as fit into `part_bytes`: all blocks of a prefix are as large as its first one."""
    size = tiers.size_of(RecordKind.BLOCK, names[0]) if names else None
    count = max(1, part_bytes // size) if size else len(names) or 1
    return [names[start : start + count] for start in range(0, len(names), count)]
