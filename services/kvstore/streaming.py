"""Streaming: the records of one read, part by part: later ones come up from the disk while earlier ones are sent.

What comes up is verified on the way; what is in DRAM was, and is verified again by its reader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from fabric.errors import Exhausted
from services.kvstore.records import BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.tiers import Tiers

PART_BYTES = 8 << 20
_FIRST_SHARE = 4  # the first part that comes up is so much smaller, the next one twice as large, and so on
# Parts that are brought up, wait for their turn or are sent, and how many of them the disk is asked for at a time: one
# is read while another one is verified; more would only come later, all at once, and leave the disk idle meanwhile.
_AHEAD, _READS = 6, 3
# No part is larger than one of so many of DRAM, for a few reads at a time must find room; one that is there needs none.
_SHARES, _HELD_SHARES = 24, 4
_WAIT_S = 0.5  # for what others keep in place: then what follows is a miss


# Calls what keeps nothing any more: at once, or when all is over that may still need the bytes.
LetGo = Callable[[Callable[[], None]], None]


def at_once(close: Callable[[], None]) -> None:
    """A `LetGo` of who needs nothing after the end."""
    close()


@dataclass(frozen=True, slots=True)
class Part:
    """Records in order. What is not `whole` is the last one: the record that should follow has left or is damaged, or
    DRAM has no room for it. What `opens` a read stays in place as long as the part behind it."""

    records: tuple[Record, ...]
    whole: bool
    opens: bool = False


async def stream(
    tiers: Tiers,
    names: Sequence[BlockName],
    identity: Identity,
    anchor: bool,
    part_bytes: int = PART_BYTES,
    let_go: LetGo = at_once,
    opening_bytes: int = 0,
) -> AsyncGenerator[Part, None]:
    """The blocks of `names` and, with `anchor`, the last one's anchor; close it when it is not read to its end.

    What is ready comes at once, as one part. Its bytes stay in place until the next one is asked for, and those of what
    was not followed by another one until `let_go` calls what it is given. What is in DRAM
    alone stays until its turn: what comes up makes no room at the cost of what could not come up again. With
    `opening_bytes` the first so many bytes come alone if they are in DRAM, before anything is known of the rest.
    """
    rising = _Rising(tiers, identity, anchor, let_go)
    try:
        opening = rising.open(names, opening_bytes)
        if opening:
            yield Part(tuple(opening), whole=True, opens=True)
        rising.plan(_cut(tiers, names[len(opening) :], min(part_bytes, tiers.dram.capacity // _SHARES)))
        while not rising.over:
            ready = await rising.ready()
            yield Part(tuple(record for part in ready for record in part.records), ready[-1].whole)
            rising.sent(ready)
    finally:
        await rising.close()


@dataclass(frozen=True, slots=True)
class _Plan:
    """Names by part; the first `held` parts were in DRAM at the start. `size`: bytes of a block."""

    parts: list[Sequence[BlockName]]
    held: int
    size: int


class _Rising:
    """Parts of one read on their way, in order. Each is kept in place until it was sent."""

    def __init__(self, tiers: Tiers, identity: Identity, anchor: bool, let_go: LetGo) -> None:
        self._tiers, self._identity, self._anchor, self._let_go = tiers, identity, anchor, let_go
        self._plan = _Plan([], 0, 0)
        self._opening = ExitStack()
        self._kept: list[ExitStack] = []
        self._ahead: deque[asyncio.Task[Part]] = deque()
        self._disk = asyncio.Semaphore(_READS)
        self._at = 0  # parts that were sent
        self._ended = False

    def open(self, names: Sequence[BlockName], most_bytes: int) -> list[Record]:
        """The first blocks, of so many bytes and not all, if they are in DRAM and may be kept in place at once."""
        size = self._tiers.size_of(RecordKind.BLOCK, names[0]) if names and most_bytes else None
        count = most_bytes // size if size else 0
        if not 0 < count < len(names):
            return []
        records = self._tiers.collect(names[:count], self._identity, False)
        nbytes, allowance = sum([record.size for record in records]), self._tiers.allowance
        if len(records) < count or not allowance.take_now(nbytes):
            return []
        self._opening.callback(allowance.give, nbytes)
        self._keep(records, self._opening)
        return records

    def plan(self, plan: _Plan) -> None:
        """What comes behind the opening. Keeps in place what of it is in DRAM alone."""
        self._plan, self._kept = plan, [ExitStack() for _ in plan.parts]
        for number, held in enumerate(self._kept):
            warm = self._tiers.only_warm(plan.parts[number], self._identity, self._wants_anchor(number))
            held.enter_context(self._tiers.dram.pinned(warm))

    @property
    def over(self) -> bool:
        """Whether nothing follows."""
        return self._ended or self._at == len(self._plan.parts)

    async def ready(self) -> list[Part]:
        """The next part, and those behind it that are there as well; not beyond one that is not whole."""
        # What is there already is kept in place one part at a time.
        most = _AHEAD if self._plan.held - self._at <= 1 else 1
        if not self._ahead and self._at + 1 == len(self._plan.parts):
            return [await self._bring(self._at)]  # alone: nothing is to be waited for beside it
        for number in range(self._at + len(self._ahead), min(self._at + most, len(self._plan.parts))):
            self._ahead.append(asyncio.ensure_future(self._bring(number)))
        found = [await self._ahead[0]]
        self._ahead.popleft()
        while found[-1].whole and self._ahead and self._ahead[0].done():
            found.append(await self._ahead.popleft())
        return found

    def sent(self, parts: Sequence[Part]) -> None:
        """Nobody needs the bytes of the next parts any more, nor those of the opening."""
        self._opening.close()
        for held in self._kept[self._at : self._at + len(parts)]:
            held.close()
        self._at += len(parts)
        self._ended = not parts[-1].whole

    async def close(self) -> None:
        """Ends what is on its way, and keeps nothing longer than it is needed."""
        for task in self._ahead:
            task.cancel()
        await asyncio.gather(*self._ahead, return_exceptions=True)
        for held in (self._opening, *self._kept):
            self._let_go(held.close)

    async def _bring(self, number: int) -> Part:
        """Brings a part up, and keeps it in place."""
        names, anchor, held = self._plan.parts[number], self._wants_anchor(number), self._kept[number]
        async with self._disk:
            if not await self._allowed(number):
                return Part((), whole=False)
            await self._tiers.raise_(names, self._identity, anchor)
        records = self._tiers.collect(names, self._identity, anchor)
        self._keep(records, held)
        return Part(tuple(records), len(records) == len(names) + anchor)

    def _keep(self, records: Sequence[Record], held: ExitStack) -> None:
        held.enter_context(self._tiers.dram.pinned(records))
        asyncio.get_running_loop().call_soon(self._tiers.use, records)  # the reader need not wait for it

    async def _allowed(self, number: int) -> bool:
        """Whether a part may be kept in place. While what comes before it is kept, only that can make room for it."""
        nbytes, allowance = len(self._plan.parts[number]) * self._plan.size, self._tiers.allowance
        while True:
            try:
                taken = await allowance.take(nbytes, _WAIT_S)
            except (TimeoutError, Exhausted) as error:
                if number == self._at or isinstance(error, Exhausted):
                    return False
            else:
                self._kept[number].callback(allowance.give, taken)
                return True

    def _wants_anchor(self, number: int) -> bool:
        return self._anchor and number == len(self._plan.parts) - 1


def _cut(tiers: Tiers, names: Sequence[BlockName], part_bytes: int) -> _Plan:
    """What is in DRAM at the start, in so many parts, then parts of so many blocks as fit into `part_bytes`, the first
    of them fewer: all blocks of a prefix are as large as its first one."""
    size = tiers.size_of(RecordKind.BLOCK, names[0]) if names else None
    if not size:
        return _Plan([names] if names else [], 0, 0)
    # Where there is no disk, what is not in DRAM is nowhere: it need not be known beforehand.
    held = _held(tiers, names) if tiers.nvme is not None else len(names)
    most = max(1, tiers.dram.capacity // _HELD_SHARES // size)
    first = [names[start : min(start + most, held)] for start in range(0, held, most)]
    return _Plan([*first, *_growing(names[held:], part_bytes // size)], len(first), size)


def _growing(names: Sequence[BlockName], most: int) -> Iterator[Sequence[BlockName]]:
    """Parts of so many blocks: the first of them soon, the later ones at less cost each."""
    at, count = 0, max(1, most // _FIRST_SHARE)
    while at < len(names):
        yield names[at : at + count]
        at, count = at + count, max(1, min(2 * count, most))


def _held(tiers: Tiers, names: Sequence[BlockName]) -> int:
    """Leading blocks in DRAM."""
    found = (
        index for index, name in enumerate(names) if tiers.dram.by_id(RecordId(RecordKind.BLOCK, name.key)) is None
    )
    return next(found, len(names))
