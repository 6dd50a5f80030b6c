"""A long read streams: what is in DRAM is there at once, what is on disk follows, and damage ends it where it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np

from services.kvstore import streaming
from services.kvstore.nvme.format import PAGE
from services.kvstore.records import BlockName, Identity, Record, RecordId, RecordKind
from services.kvstore.streaming import stream
from tests.unit.services.kvstore.test_tiers import IDENTITY, SIZE, Bench, name, opened, payload, stalled

PART = 2 * SIZE


async def chain(bench: Bench, numbers: range, cold: range) -> None:
    """Blocks of one prefix on disk, all but `cold` also in DRAM."""
    for number in numbers:
        assert bench.put(number, parent=number - 1 if number else None)
    await bench.written()
    for number in reversed(cold):
        record = bench.tiers.dram.by_id(RecordId(RecordKind.BLOCK, name(number).key))
        assert record is not None
        bench.tiers.dram.drop(record)


async def read(bench: Bench, numbers: range) -> list[int]:
    """Blocks that come, part by part, each as it was put."""
    sizes = []
    asked = [name(number) for number in numbers]
    async with aclosing(stream(bench.tiers, asked, IDENTITY, False, PART)) as parts:
        async for part in parts:
            for record in part.records:
                data = bench.tiers.dram.memory[record.offset : record.offset + SIZE]
                assert (data == payload(numbers[sum(sizes)])).all()
                sizes.append(1)
    return [sum(sizes), *([0] if not part.whole else [])]


async def test_what_is_in_dram_comes_while_the_disk_still_reads(tmp_path: Path, monkeypatch) -> None:
    async with opened(tmp_path, records=32) as bench:
        await chain(bench, range(12), cold=range(4, 12))
        asked = [name(number) for number in range(12)]
        async with aclosing(stream(bench.tiers, asked, IDENTITY, False, PART)) as parts:
            with stalled(monkeypatch, "preadv") as waits:
                async with asyncio.timeout(10.0):
                    first = await anext(parts)
                assert len(first.records) == 4 and first.whole
                assert await asyncio.to_thread(waits.wait, 10.0)
                assert len(bench.held()) == 4  # nothing came up yet
            rest = [len(part.records) async for part in parts]
        assert sum(rest) == 8 and bench.held() == set(range(12))


async def test_what_is_ready_comes_as_one_part(tmp_path: Path, monkeypatch) -> None:
    async with opened(tmp_path, records=128) as bench:
        await chain(bench, range(9), cold=range(9))
        asked, collected, all_there = [name(number) for number in range(9)], [], asyncio.Event()
        real = bench.tiers.collect

        def collect(names: Sequence[BlockName], identity: Identity, anchor: bool) -> list[Record]:
            found = real(names, identity, anchor)
            collected.extend(found)
            if len(collected) == len(asked):
                all_there.set()
            return found

        monkeypatch.setattr(bench.tiers, "collect", collect)
        async with aclosing(stream(bench.tiers, asked, IDENTITY, False, PART)) as parts:
            first = await anext(parts)
            async with asyncio.timeout(10.0):
                await all_there.wait()
            rest = [len(part.records) async for part in parts]
        left = 9 - len(first.records)
        assert rest == ([left] if left else []), "on a slow machine all may be there at once"


async def test_reads_at_a_time_keep_no_more_than_their_half_of_dram_in_place(tmp_path: Path) -> None:
    async with opened(tmp_path, records=32) as bench:
        await chain(bench, range(24), cold=range(24))
        allowance, asked, most = bench.tiers.allowance, [name(number) for number in range(24)], 0
        assert allowance.most_bytes == bench.tiers.dram.capacity // 2

        async def read_slowly() -> int:
            nonlocal most
            blocks = 0
            async with aclosing(stream(bench.tiers, asked, IDENTITY, False, PART)) as parts:
                async for part in parts:
                    blocks += len(part.records)
                    most = max(most, allowance.taken)
                    await asyncio.sleep(0)
            return blocks

        async with asyncio.timeout(30.0):
            assert await asyncio.gather(*(read_slowly() for _ in range(20))) == [24] * 20
        assert 0 < most <= allowance.most_bytes and allowance.taken == 0


async def test_a_read_ends_where_others_keep_all_that_reads_may(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(streaming, "_WAIT_S", 0.01)
    async with opened(tmp_path, records=16) as bench:
        await chain(bench, range(8), cold=range(4, 8))
        taken = await bench.tiers.allowance.take(bench.tiers.dram.capacity, 1.0)
        assert await read(bench, range(8)) == [0, 0]
        bench.tiers.allowance.give(taken)
        assert await read(bench, range(8)) == [8]


async def test_a_long_read_of_what_is_in_dram_leaves_room_for_others(tmp_path: Path) -> None:
    async with opened(tmp_path, records=16) as bench:
        await chain(bench, range(16), cold=range(0))
        asked = [name(number) for number in range(16)]
        async with aclosing(stream(bench.tiers, asked, IDENTITY, False, PART)) as parts:
            assert len((await anext(parts)).records) == 4
            for number in range(300, 308):
                assert bench.put(number)  # most of the prefix gives way, what is being sent does not
                await bench.written()
        assert {0, 1, 2, 3} <= bench.held()


async def test_a_read_longer_than_dram_comes_whole(tmp_path: Path) -> None:
    async with opened(tmp_path, records=16) as bench:
        for number in range(40):
            assert bench.put(number, parent=number - 1 if number else None)
            await bench.written()
        assert len(bench.held()) <= 16 and await read(bench, range(40)) == [40]


async def test_what_is_in_dram_alone_is_not_evicted_for_what_comes_up(tmp_path: Path) -> None:
    async with opened(tmp_path, records=16) as bench:
        await chain(bench, range(16), cold=range(8))
        for number in range(8, 16):  # as if the disk had had no time for them
            bench.nvme.forget(RecordId(RecordKind.BLOCK, name(number).key))
        for number in range(100, 108):  # full again, of what is younger
            bench.clock.advance(1.0)
            assert bench.put(number)
            await bench.written()
        assert await read(bench, range(16)) == [16]


async def test_what_comes_up_damaged_ends_the_read_there(tmp_path: Path) -> None:
    async with opened(tmp_path, records=32) as bench:
        await chain(bench, range(8), cold=range(5, 8))
        entry = bench.nvme._index.get(RecordId(RecordKind.BLOCK, name(6).key))
        assert entry is not None
        path = tmp_path / f"{entry.place.segment:012d}.segment"
        data = np.fromfile(path, np.uint8)
        data[entry.place.offset + entry.place.nbytes - PAGE] ^= 1
        data.tofile(path)
        assert await read(bench, range(8)) == [6, 0]


async def test_a_read_that_is_given_up_lets_go_of_everything(tmp_path: Path, monkeypatch) -> None:
    async with opened(tmp_path, records=16) as bench:
        await chain(bench, range(12), cold=range(2, 12))
        asked = [name(number) for number in range(12)]
        with stalled(monkeypatch, "preadv") as waits:
            parts = stream(bench.tiers, asked, IDENTITY, False, PART)
            await anext(parts)
            assert await asyncio.to_thread(waits.wait, 10.0)
            closing = asyncio.ensure_future(parts.aclose())
            await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            await closing
        for number in range(200, 216):  # nothing is pinned, no room is lost
            assert bench.put(number)
            await bench.written()
        assert len(bench.held()) == 16


async def test_the_opening_comes_alone_and_stays_in_place_until_the_part_behind_it_was_sent(tmp_path: Path) -> None:
    async with opened(tmp_path, records=32) as bench:
        await chain(bench, range(12), cold=range(8, 12))
        asked, pins = [name(number) for number in range(12)], bench.tiers.dram._pins
        async with aclosing(stream(bench.tiers, asked, IDENTITY, False, PART, opening_bytes=3 * SIZE)) as parts:
            first = await anext(parts)
            assert (first.opens, first.whole, len(first.records), len(pins)) == (True, True, 3, 3)
            second = await anext(parts)
            assert not second.opens and {record.offset for record in first.records} <= set(pins)
            blocks, third = len(second.records), await anext(parts)
            assert not {record.offset for record in first.records} & set(pins)
            blocks += len(third.records)
            async for part in parts:
                assert not part.opens
                blocks += len(part.records)
        assert blocks == 9 and bench.tiers.allowance.taken == 0


async def test_there_is_no_opening_where_it_would_be_all_or_is_not_in_dram(tmp_path: Path) -> None:
    async with opened(tmp_path, records=32) as bench:
        await chain(bench, range(6), cold=range(2, 6))
        for count, blocks in ((2, 2), (6, 3)):
            asked = [name(number) for number in range(count)]
            found = stream(bench.tiers, asked, IDENTITY, False, PART, opening_bytes=blocks * SIZE)
            async with aclosing(found) as parts:
                assert not [part async for part in parts if part.opens]


async def test_what_was_not_followed_by_another_part_is_kept_until_it_is_let_go_of(tmp_path: Path) -> None:
    async with opened(tmp_path, records=32) as bench:
        await chain(bench, range(6), cold=range(0))
        asked, kept = [name(number) for number in range(6)], list[Callable[[], None]]()
        found = stream(bench.tiers, asked, IDENTITY, False, PART, kept.append, opening_bytes=SIZE)
        async with aclosing(found) as parts:
            await anext(parts)
            await anext(parts)
        assert len(bench.tiers.dram._pins) == 6 and bench.tiers.allowance.taken == 6 * SIZE
        for close in kept:
            close()
        assert not bench.tiers.dram._pins and not bench.tiers.allowance.taken
