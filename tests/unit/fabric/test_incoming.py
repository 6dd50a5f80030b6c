"""What a receiver makes of chunks that no honest writer sends, and of places that do not take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from fabric.errors import Cancelled, DataLoss, DeadlineExceeded, Exhausted, Internal, InvalidArgument
from fabric.kvlink import messages, open_link
from fabric.kvlink.credit import Run
from fabric.kvlink.extents import Extents
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Link, Notice
from fabric.kvlink.messages import Chunk, Credit, GaveUp, Refusal, Unreadable, Word
from fabric.kvlink.slabs import SlabState, Writer
from fabric.kvlink.verify import digest
from fabric.records import LinkAddress
from tests.support.link_peer import Placed

RING = 4096
WRITER, IMPOSTOR = ("prefill-1", 1), ("prefill-2", 1)


class Desk:
    """An intake whose ring the test itself fills and announces."""

    def __init__(self, intake: Intake, pool: LandingPool) -> None:
        self.intake, self.pool, self.placed = intake, pool, Placed()
        self.landing = intake.open("t", RING, self.placed)

    def write(self, offset: int, values: bytes) -> int:
        """Bytes as a writer's push leaves them; returns their digest."""
        start = self.landing.offset + offset
        self.pool._memory[start : start + len(values)] = np.frombuffer(values, np.uint8)
        return digest(np.frombuffer(values, np.uint8).copy())

    def chunk(self, number: int, start: int, values: bytes, block: int, last: bool = False) -> Chunk:
        offset = start % RING
        row = ("latent", block, 1, offset, len(values), self.write(offset, values))
        return Chunk("t", number, Run(offset, start, start + len(values)), last, Extents.of([row]))

    def say(self, message: Chunk | GaveUp, writer: tuple[str, int] = WRITER) -> None:
        assert self.intake.noticed(Notice(*writer, message.pack()))

    def block(self, number: int) -> bytes:
        return self.placed.blocks["latent", number].tobytes()


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    link = open_link("inproc://", "decode-1", 1)
    pool = LandingPool(link, 4 * RING, slab_bytes=1024, retire_after_s=1e9)
    intake = Intake(link, pool)
    yield Desk(intake, pool)
    await intake.aclose()
    await link.close()


async def test_a_notice_of_another_protocol_is_left_to_others(desk):
    assert not desk.intake.noticed(Notice(*WRITER, b"\x02ticket"))
    assert desk.intake.noticed(Notice(*WRITER, b"\x10garbage"))  # of this one, and dropped


async def test_a_chunk_that_is_announced_twice_or_early_is_placed_once_and_in_order(desk):
    first, second = desk.chunk(0, 0, b"a" * 100, 0), desk.chunk(1, 100, b"b" * 100, 1, last=True)
    desk.say(second)
    desk.say(first)
    desk.say(first)
    extents = await desk.intake.ready("t", 5.0)
    assert [block for _, block in extents] == [0, 1]
    assert (desk.block(0), desk.block(1)) == (b"a" * 100, b"b" * 100)
    assert desk.pool.stats().committed_bytes_total == 200
    assert desk.pool.state("t") is SlabState.FREE


async def test_a_block_that_is_sent_again_counts_as_it_came_last(desk):
    desk.say(desk.chunk(0, 0, b"old " * 25, 0))
    desk.say(desk.chunk(1, 100, b"new " * 25, 0, last=True))
    verified = await desk.intake.ready("t", 5.0)
    assert desk.block(0) == b"new " * 25
    assert verified == {("latent", 0): (1, 100, digest(desk.placed.blocks["latent", 0]))}


async def test_an_impostor_neither_writes_nor_ends_anothers_transfer(desk):
    desk.say(desk.chunk(0, 0, b"a" * 100, 0))
    desk.say(desk.chunk(1, 100, b"x" * 100, 1, last=True), IMPOSTOR)
    desk.say(GaveUp("t"), IMPOSTOR)
    with pytest.raises(DeadlineExceeded):
        await desk.intake.ready("t", 0.1)
    desk.say(desk.chunk(1, 100, b"b" * 100, 1, last=True))
    assert len(await desk.intake.ready("t", 5.0)) == 2
    assert desk.block(1) == b"b" * 100


async def test_a_chunk_without_credit_ends_the_transfer(desk):
    desk.say(desk.chunk(0, 0, b"a" * 4000, 0))
    over = Chunk("t", 1, Run(0, 3 * RING, 3 * RING + 10), False, Extents.of(()))
    desk.intake._open["t"].ring.taken_out = 100  # as if the first were still being copied
    desk.say(over)
    with pytest.raises(InvalidArgument, match="without credit"):
        await desk.intake.ready("t", 5.0)


async def test_an_extent_outside_its_chunk_is_refused_before_it_is_read(desk):
    chunk = desk.chunk(0, 0, b"a" * 100, 0)
    stretched = Chunk("t", 0, Run(0, 0, 50), True, chunk.extents)
    desk.say(stretched)
    with pytest.raises(InvalidArgument, match="not in its chunk"):
        await desk.intake.ready("t", 5.0)
    assert not desk.placed.blocks


async def test_extents_that_overlap_are_refused_before_they_are_read(desk):
    chunk = desk.chunk(0, 0, b"a" * 100, 0)
    desk.say(Chunk("t", 0, chunk.run, True, Extents.of(chunk.extents.rows() * 2)))
    with pytest.raises(InvalidArgument, match="overlap"):
        await desk.intake.ready("t", 5.0)
    assert not desk.placed.blocks


async def test_extents_that_wait_for_an_earlier_chunk_are_bounded(desk):
    rows = tuple(("latent", 1, 1, offset, 1, 0) for offset in range(RING))
    for number in range(1, 30):
        desk.say(Chunk("t", number, Run(0, number * RING, (number + 1) * RING), False, Extents.of(rows)))
    with pytest.raises(InvalidArgument, match="early"):
        await desk.intake.ready("t", 5.0)


async def test_a_stranger_is_not_answered_and_cannot_pass_for_a_newer_incarnation_of_a_writer(desk):
    """Its epoch would make the address of the true writer an old one."""
    link = open_link("inproc://", *WRITER)
    stranger = (WRITER[0], 1 << 60)
    reply = LinkAddress("inproc://", *stranger)
    desk.say(Chunk("unknown", 0, Run(0, 0, 0), False, Extents.of(()), reply), stranger)
    await asyncio.sleep(0)
    chunk = desk.chunk(0, 0, b"a" * 3000, 0)
    desk.say(Chunk("t", 0, chunk.run, False, chunk.extents, link.address))
    async with asyncio.timeout(5.0):
        credit = await anext(link.notices())
    assert messages.unpack(credit.payload) == Credit("t", 3000, 1)
    await link.close()


async def test_a_defect_of_who_is_told_does_not_end_the_consumer_of_notices(desk):
    def defect(*_: object) -> None:
        raise KeyError("t")

    desk.intake._heard = defect
    desk.say(desk.chunk(0, 0, b"a" * 100, 0, last=True))
    assert len(await desk.intake.ready("t", 5.0)) == 1


@pytest.mark.parametrize(
    ("raised", "seen"), [(InvalidArgument("no such block", field="block"), InvalidArgument), (KeyError(7), Internal)]
)
async def test_a_place_that_does_not_take_an_extent_ends_the_transfer_not_the_intake(desk, raised, seen):
    def refuse(*_: object) -> np.ndarray:
        raise raised

    desk.intake._open["t"].place = refuse
    desk.say(desk.chunk(0, 0, b"a" * 100, 0, last=True))
    with pytest.raises(seen):
        await desk.intake.ready("t", 5.0)
    await desk.intake.close("t", Writer.FINISHED)
    other = desk.intake.open("other", RING, desk.placed)
    assert other.size == RING


async def test_a_writer_that_gives_up_frees_the_landing_at_once_and_a_late_word_frees_one_in_doubt(desk):
    desk.say(desk.chunk(0, 0, b"a" * 100, 0))
    desk.say(GaveUp("t"))
    with pytest.raises(Cancelled):
        await desk.intake.ready("t", 5.0)
    assert desk.pool.state("t") is SlabState.FREE
    desk.intake.open("later", RING, desk.placed)
    await desk.intake.close("later", Writer.UNKNOWN)
    assert desk.pool.state("later") is SlabState.QUARANTINED
    desk.say(GaveUp("later"))
    assert desk.pool.state("later") is SlabState.FREE
    await desk.intake.close("later", Writer.DEAD)  # safe to repeat


async def test_one_wrong_digest_ends_the_transfer_and_what_follows_is_not_placed(desk):
    good, wrong = desk.chunk(0, 0, b"a" * 100, 0), desk.chunk(1, 100, b"b" * 100, 1)
    desk.write(150, b"!")
    desk.say(good)
    desk.say(wrong)
    with pytest.raises(DataLoss, match="block 1"):
        await desk.intake.ready("t", 5.0)
    desk.say(desk.chunk(2, 200, b"c" * 100, 2, last=True))
    await asyncio.sleep(0)
    assert ("latent", 2) not in desk.placed.blocks
    assert desk.pool.state("t") is SlabState.FREE  # that was its last: it writes no more


async def test_landings_are_bounded_and_every_ending_returns_them(desk):
    for owner in ("a", "b", "c"):
        desk.intake.open(owner, RING, desk.placed)
    with pytest.raises(Exhausted):
        desk.intake.open("d", RING, desk.placed)
    for owner in ("t", "a", "b", "c"):
        await desk.intake.close(owner, Writer.NEVER_STARTED)
    assert desk.pool.stats().free == 16


class Lent:
    """Memory of a writer that the intake reads where it is; `readable` tells whether it can."""

    NAME = b"a name of shared memory"

    def __init__(self, desk: Desk, readable: bool = True) -> None:
        self.memory = np.random.default_rng(1).integers(0, 256, 10_000, dtype=np.uint8)
        self.asked: list[tuple[str, int, bytes]] = []

        def view(peer: str, epoch: int, shared: bytes) -> np.ndarray | None:
            self.asked.append((peer, epoch, shared))
            return self.memory if readable else None

        desk.intake._link.view = view  # type: ignore[method-assign]

    def chunk(self, number: int, start: int, size: int, at: int, last: bool = False, reply: object = None) -> Chunk:
        row = ("latent", number, 1, at, size, digest(self.memory[at : at + size]))
        run = Run(start % RING, start, start + size)
        return Chunk("t", number, run, last, Extents.of([row]), reply, self.NAME)  # type: ignore[arg-type]


@pytest.fixture
async def writer_link() -> AsyncIterator[Link]:
    link = open_link("inproc://", *WRITER)
    yield link
    await link.close()


async def answered(link: Link) -> object:
    async with asyncio.timeout(5.0):
        return messages.unpack((await anext(aiter(link.notices()))).payload)


async def test_what_is_lent_is_copied_from_where_it_is_and_confirmed(desk, writer_link):
    lent = Lent(desk)
    desk.say(lent.chunk(0, 0, 500, at=9_500, last=True, reply=writer_link.address))
    await desk.intake.ready("t", 5.0)
    assert desk.block(0) == lent.memory[9_500:].tobytes()
    assert lent.asked[0] == (*WRITER, Lent.NAME)
    assert await answered(writer_link) == Credit("t", 500, 1)
    assert desk.pool.state("t") is SlabState.FREE  # all was taken: nothing will be written


async def test_who_waits_for_the_bytes_runs_before_their_writer_is_told(desk, writer_link, monkeypatch):
    order: list[str] = []

    def told(reply: LinkAddress, writes: object, *, notify: bytes) -> bool:
        order.append("told")
        return True

    async def wait() -> None:
        await desk.intake.ready("t", 5.0)
        order.append("ready")

    monkeypatch.setattr(desk.intake._link, "push_at_once", told)
    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    desk.say(replace(desk.chunk(0, 0, b"a" * 100, 0, last=True), reply=writer_link.address))
    assert order == []
    await waiting
    for _ in range(3):
        await asyncio.sleep(0)
    assert order == ["ready", "told"]


async def test_what_its_owner_changed_after_it_was_sealed_is_found(desk, writer_link):
    lent = Lent(desk)
    chunk = lent.chunk(0, 0, 500, at=100, last=True, reply=writer_link.address)
    lent.memory[400] ^= 1
    desk.say(chunk)
    with pytest.raises(DataLoss, match="group latent block 0"):
        await desk.intake.ready("t", 5.0)
    refusal = await answered(writer_link)
    assert isinstance(refusal, Refusal) and refusal.code == DataLoss.code
    await desk.intake.close("t", Writer.UNKNOWN)
    assert desk.pool.state("t") is SlabState.QUARANTINED  # it has not said that it is done


@pytest.mark.parametrize(("at", "size"), [(9_501, 500), (1 << 63, 500), (0, 501)])
async def test_an_extent_outside_the_memory_that_is_lent_is_refused_before_it_is_read(desk, at, size):
    lent = Lent(desk)
    row = ("latent", 0, 1, at, size, 0)
    desk.say(Chunk("t", 0, Run(0, 0, 500), True, Extents.of([row]), None, lent.NAME))
    with pytest.raises(InvalidArgument, match=r"not in its chunk|overlap"):
        await desk.intake.ready("t", 5.0)
    assert not desk.placed.blocks


async def test_what_cannot_be_read_is_asked_for_in_the_landing_and_never_looked_at_again(desk, writer_link):
    """Else a slab could return while its writer, as it was told to, writes."""
    lent = Lent(desk, readable=False)
    desk.say(lent.chunk(0, 0, 500, at=0, last=True, reply=writer_link.address))
    assert await answered(writer_link) == Unreadable("t")
    lent = Lent(desk)  # now it could be
    desk.say(lent.chunk(0, 0, 500, at=0, last=True, reply=writer_link.address))
    assert await answered(writer_link) == Unreadable("t")
    assert not desk.placed.blocks and desk.pool.state("t") is SlabState.GRANTED
    desk.say(desk.chunk(0, 0, b"w" * 500, 0, last=True))
    await desk.intake.ready("t", 5.0)
    assert desk.block(0) == b"w" * 500


async def test_a_last_chunk_that_was_lent_and_came_early_is_not_taken_from_there_once_an_earlier_one_must_be_written(
    desk, writer_link
):
    desk.say(Lent(desk).chunk(1, 500, 500, at=0, last=True))
    desk.say(Lent(desk, readable=False).chunk(0, 0, 500, at=0, reply=writer_link.address))
    assert await answered(writer_link) == Unreadable("t")
    Lent(desk)  # now it could be read
    desk.say(desk.chunk(0, 0, b"v" * 500, 0))
    assert desk.pool.state("t") is SlabState.GRANTED and list(desk.placed.blocks) == [("latent", 0)]
    desk.say(desk.chunk(1, 500, b"w" * 500, 1, last=True))
    await desk.intake.ready("t", 5.0)
    assert desk.block(1) == b"w" * 500


async def test_a_writer_that_did_not_hear_of_the_end_is_told_again_and_nobody_else_is(desk, writer_link):
    lent = Lent(desk)
    last = lent.chunk(0, 0, 500, at=0, last=True, reply=writer_link.address)
    desk.say(last)
    await desk.intake.ready("t", 5.0)
    assert await answered(writer_link) == Credit("t", 500, 1)
    await desk.intake.close("t", Writer.FINISHED)
    other = open_link("inproc://", *IMPOSTOR)
    desk.say(lent.chunk(0, 0, 500, at=0, last=True, reply=other.address), IMPOSTOR)
    desk.say(last)
    assert await answered(writer_link) == Credit("t", 500, 1)
    assert not other._inbox._notices
    await other.close()


async def test_who_is_told_of_writers_hears_that_one_is_done_when_all_it_lent_was_taken(desk):
    words = []
    desk.intake._heard = lambda owner, writer, word: words.append(word)
    lent = Lent(desk)
    desk.say(lent.chunk(0, 0, 500, at=0, last=True))
    assert words == [Word.DONE, Word.ALIVE]


def ahead(chunk: Chunk) -> Chunk:
    """The same, without a place in the landing."""
    return replace(chunk, run=Run(0, 0, 0))


async def test_what_is_announced_ahead_needs_no_place_and_is_copied_in_order(desk, writer_link):
    lent = Lent(desk)
    desk.say(ahead(lent.chunk(1, 0, 4000, at=4000, last=True, reply=writer_link.address)))
    desk.say(ahead(lent.chunk(0, 0, 4000, at=0)))
    assert list(await desk.intake.ready("t", 5.0)) == [("latent", 0), ("latent", 1)]
    assert desk.block(0) + desk.block(1) == lent.memory[:8000].tobytes()
    assert await answered(writer_link) == Credit("t", 0, 2)
    assert desk.intake._open["t"].lent_bytes == 0


async def test_no_more_is_taken_ahead_than_was_granted(desk, writer_link):
    lent = Lent(desk)
    desk.intake._open["t"].landing = replace(desk.landing, lent_bytes=5000)
    desk.say(ahead(lent.chunk(1, 0, 3000, at=0)))  # it waits for the first one
    desk.say(ahead(lent.chunk(2, 0, 3000, at=3000)))
    with pytest.raises(InvalidArgument, match=r"overlap|not in its chunk"):
        await desk.intake.ready("t", 5.0)
    assert not desk.placed.blocks


async def test_what_was_announced_ahead_and_cannot_be_read_is_taken_from_the_landing(desk, writer_link):
    lent = Lent(desk, readable=False)
    for number in range(3):
        reply = writer_link.address if number == 2 else None
        desk.say(ahead(lent.chunk(number, 0, 3000, at=3000 * number, last=number == 2, reply=reply)))
    assert await answered(writer_link) == Unreadable("t")
    for number in range(3):
        start = number * RING
        desk.say(desk.chunk(number, start, bytes([number]) * 3000, number, last=number == 2))
    await desk.intake.ready("t", 5.0)
    assert [desk.block(number)[:1] for number in range(3)] == [b"\0", b"\1", b"\2"]


class Kernel:
    """Copies nothing and finds all well; tells how much it was given at a time, and of which transfer's memory."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.begun = asyncio.Event()

    def __call__(self, address: int, rows: np.ndarray) -> int:
        self.given.append(rows[:, 2].tolist())  # digests: they name the rows here
        self.begun.set()
        return -1


async def many(link: Link, kernel: Kernel) -> Intake:
    """One chunk at a time; two of what `lent_to` announces are copied at once."""
    pool = LandingPool(link, 4 * RING, slab_bytes=1024, kernel=kernel)
    pool.inline_bytes = 2000
    intake = Intake(link, pool, commits=1)
    memory = np.zeros(100_000, np.uint8)
    intake._link.view = lambda peer, epoch, shared: memory  # type: ignore[method-assign]
    for owner in ("t", "u"):
        intake.open(owner, RING, Placed())
    return intake


def lent_to(owner: str, count: int, seal: int) -> Notice:
    rows = [("latent", index, 1, 1000 * index, 1000, seal + index) for index in range(count)]
    chunk = Chunk(owner, 0, Run(0, 0, 0), True, Extents.of(rows), None, Lent.NAME)
    return Notice(*WRITER, chunk.pack())


async def test_a_chunk_that_takes_long_lets_others_have_their_turns():
    link, kernel = open_link("inproc://", "decode-1", 1), Kernel()
    intake = await many(link, kernel)
    intake.noticed(lent_to("t", 10, seal=0))
    intake.noticed(lent_to("u", 3, seal=100))
    for owner in ("t", "u"):
        await intake.ready(owner, 5.0)
    assert kernel.given[:3] == [[0, 1], [100, 101], [2, 3]] and len(kernel.given) == 7
    await intake.aclose()
    await link.close()


async def test_a_transfer_that_ends_while_a_long_chunk_is_copied_is_copied_no_further():
    link, kernel = open_link("inproc://", "decode-1", 1), Kernel()
    intake = await many(link, kernel)
    intake.noticed(lent_to("t", 10, seal=0))
    await kernel.begun.wait()
    await intake.close("t", Writer.FINISHED)
    assert len(kernel.given) < 5
    await intake.aclose()
    await link.close()
