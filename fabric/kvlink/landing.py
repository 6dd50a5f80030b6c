"""The landing desk: memory that writers write to, and the only door from there into live blocks. Knows no models.

Bytes never land in live memory. They land in slabs registered once; `commit` copies them out and believes only what it
hashed at the destination. A one-sided writer cannot be fenced, so a slab is reused only when its writer said that it
finished or is proven dead; until then it is in quarantine, where a late write spoils nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from fabric.kvlink.leftovers import to_its_end
from fabric.kvlink.link import Bytes, Link
from fabric.kvlink.slabs import SlabBook, SlabState, Writer
from fabric.kvlink.verify import (
    CopyKernel,
    CopyRows,
    Placement,
    check_placements,
    check_rows,
    copy_rows,
    mismatch,
    parts,
    row_of,
    total_bytes,
)
from fabric.records import Landing
from fabric.telemetry import logs

_log = logs.get("landing")
# Up to here, a quarter of a millisecond, a change of thread costs more than it saves: more so on a busy machine. A
# kernel copies 16 MiB, a whole chunk of what is lent, in 1.4 ms, and lets other threads run meanwhile.
_INLINE_BYTES, _KERNEL_INLINE_BYTES = 1 << 20, 16 << 20


@dataclass(frozen=True, slots=True)
class LandingStats:
    """Slabs by state now, and what happened since the start."""

    slab_bytes: int
    free: int
    granted: int
    quarantined: int
    retired: int
    grants_total: int
    quarantines_total: int
    retirements_total: int
    committed_bytes_total: int
    digest_mismatches_total: int


class LandingPool:
    """Slabs of one link. All methods run in the link's event loop.

    Args:
        link: where writers reach the memory; the pool registers it there once.
        capacity_bytes: all landing memory of this process, rounded up to whole slabs.
        slab_bytes: unit of grants.
        retire_after_s: seconds after which nobody waits for a silent writer any more.
        max_doubt_share: share of the slabs that may be in doubt before grants are refused.
        kernel: copies and digests at once; without one numpy and xxhash take turns.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        link: Link,
        capacity_bytes: int,
        slab_bytes: int = 256 << 10,
        retire_after_s: float = 60.0,
        max_doubt_share: float = 0.5,
        kernel: CopyKernel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        slabs = -(-capacity_bytes // slab_bytes)
        self._memory = link.allocate(slabs * slab_bytes)
        self._link = link
        self._region = link.register(self._memory)
        self._book = SlabBook(slabs, slab_bytes, max_doubt_share)
        self._retire_after_s = retire_after_s
        self._clock = clock
        self._copy = partial(copy_rows, kernel=kernel)
        self.has_kernel = kernel is not None  # and takes tables of rows
        self.inline_bytes = _KERNEL_INLINE_BYTES if kernel is not None else _INLINE_BYTES
        self._expecting: dict[str, ExitStack] = {}
        self._committed_bytes = 0
        self._mismatches = 0

    def grant(self, owner: str, nbytes: int, lent_bytes: int = 0) -> Landing:
        """Memory for one writer, until `release`. `owner` becomes the landing's id and must be new. `lent_bytes`: of
        its own memory that the writer may announce ahead.

        Raises:
            InvalidArgument: more than the pool has, or `owner` holds a landing already.
            Exhausted: no room now.
        """
        self.sweep()
        grant = self._book.take(owner, nbytes)
        waiting = self._expecting[owner] = ExitStack()
        waiting.enter_context(self._link.expecting())
        offset = grant.first * self._book.slab_bytes
        return Landing(owner, self._link.address, self._region.token.pack(), offset, nbytes, lent_bytes)

    async def commit(self, owner: str, placements: Sequence[Placement]) -> None:
        """Copies extents out of the owner's landing into live memory and verifies every byte there.

        Call it when the writer's notice or receipt says that these extents are complete; other extents of the same
        landing may still be arriving.

        Raises:
            InvalidArgument: no such landing, or an extent does not fit; nothing was copied.
            DataLoss: a digest differs. What was copied must not be used.
        """
        rows = [row_of(placement) for placement in placements]
        wrong = await self._commit(owner, rows, lambda landing_bytes: check_placements(placements, landing_bytes))
        if wrong is not None:
            raise mismatch(placements[wrong])

    async def commit_rows(self, owner: str, rows: CopyRows, lent: Bytes | None = None) -> int | None:
        """`commit` of many extents. Returns the number of the first whose digest differs; None where all is well.

        `lent`: memory that the rows lie in, where that is not the landing. Its owner may change it meanwhile, as the
        landing's writer may: the digest decides.

        Raises:
            InvalidArgument: no such landing, or a row does not fit; nothing was copied.
        """
        return await self._commit(owner, rows, partial(check_rows, rows), lent)

    def commit_at_once(self, owner: str, rows: CopyRows, lent: Bytes | None = None) -> int | None:
        """`commit_rows` before it returns: for `inline_bytes` bytes at most."""
        with self._reading(owner, partial(check_rows, rows), lent) as source:
            wrong = self._copy(source, rows)
        self._count(wrong, rows)
        return wrong

    async def _commit(
        self, owner: str, rows: CopyRows, check: Callable[[int], None], lent: Bytes | None = None
    ) -> int | None:
        wrong = None
        with self._reading(owner, check, lent) as source:
            for first, end in parts(rows, self.inline_bytes) if self.has_kernel else [(0, len(rows))]:
                wrong = await self._copy_part(source, rows[first:end])
                if wrong is not None:
                    wrong += first
                    break
        self._count(wrong, rows)
        return wrong

    async def _copy_part(self, source: Bytes, rows: CopyRows) -> int | None:
        if total_bytes(rows) > self.inline_bytes:
            # however often the caller is cancelled: memory must not be given back meanwhile
            return await to_its_end(asyncio.to_thread(self._copy, source, rows))
        wrong = self._copy(source, rows)
        await asyncio.sleep(0)  # many in a row must not keep the loop from others
        return wrong

    @contextmanager
    def _reading(self, owner: str, check: Callable[[int], None], lent: Bytes | None = None) -> Iterator[Bytes]:
        """The owner's landing, not given to anybody else meanwhile, or what stands in for it. Raises what `check` of
        its size does."""
        grant = self._book.read(owner)
        try:
            if lent is not None:
                check(lent.nbytes)
                yield lent
                return
            first, count = grant.first * self._book.slab_bytes, grant.count * self._book.slab_bytes
            check(count)
            yield self._memory[first : first + count]
        finally:
            self._book.read_done(grant, self._clock())
            self._follow_up(owner)

    def _count(self, wrong: int | None, rows: CopyRows) -> None:
        if wrong is None:
            self._committed_bytes += total_bytes(rows)
        else:
            self._mismatches += 1

    def release(self, owner: str, writer: Writer) -> bool:
        """Gives a landing back as far as its writer allows; a later call with better news frees what was in doubt.

        Returns False where there was nothing to release: safe to repeat.
        """
        released = self._book.release(owner, writer, self._clock())
        self._follow_up(owner)
        return released

    def state(self, owner: str) -> SlabState:
        """FREE for an owner without a landing."""
        grant = self._book.find(owner)
        return SlabState.FREE if grant is None else grant.state

    def sweep(self) -> int:
        """Retires what was in quarantine for too long; also done by every grant. Returns how many landings."""
        retired = self._book.retire(self._clock(), self._retire_after_s)
        if retired:
            _log.warning("landings retired", landings=retired, in_doubt=self._book.count()[SlabState.RETIRED])
            for owner in list(self._expecting):
                self._follow_up(owner)
        return retired

    @property
    def blocked(self) -> bool:
        """Whether so much is in doubt that nothing is granted until a writer speaks or is proven dead."""
        return self._book.blocked

    def stats(self) -> LandingStats:
        totals, history = self._book.count(), self._book.history
        return LandingStats(
            slab_bytes=self._book.slab_bytes,
            free=totals[SlabState.FREE],
            granted=totals[SlabState.GRANTED],
            quarantined=totals[SlabState.QUARANTINED],
            retired=totals[SlabState.RETIRED],
            grants_total=history["granted"],
            quarantines_total=history["quarantined"],
            retirements_total=history["retired"],
            committed_bytes_total=self._committed_bytes,
            digest_mismatches_total=self._mismatches,
        )

    def _follow_up(self, owner: str) -> None:
        """Notices are expected while a writer may still send one: granted or in quarantine, not retired."""
        if self.state(owner) in (SlabState.FREE, SlabState.RETIRED):
            waiting = self._expecting.pop(owner, None)
            if waiting is not None:
                waiting.close()
