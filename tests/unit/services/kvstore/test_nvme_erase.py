"""What an operator does to the NVMe tier: erased records never come back, verified ones are not used by it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.kvstore.nvme import jobs
from services.kvstore.nvme.files import SegmentFiles
from services.kvstore.nvme.format import PAGE, erased_bytes, pack_erased
from tests.support.clock import FakeClock
from tests.unit.services.kvstore.test_nvme_files import payload, stored
from tests.unit.services.kvstore.test_nvme_tier import SEGMENT, opened, read, until, wrote


def holds(folder: Path, index: int) -> bool:
    """Whether the record's bytes are anywhere on the disk."""
    return any(payload(index).tobytes() in path.read_bytes() for path in folder.glob("*.segment"))


async def test_an_erased_record_is_gone_from_the_index_the_disk_and_the_next_start(tmp_path):
    clock = FakeClock()
    async with opened(tmp_path, clock) as tier:
        await wrote(tier, 1, 2, 3)
        assert holds(tmp_path, 2)
        left = []
        tier.left = left.extend
        await tier.erase([stored(2).id])
        assert left == [stored(2).id] and not holds(tmp_path, 2)
        assert await read(tier, 2) is None and (await read(tier, 3) == payload(3)).all()
    async with opened(tmp_path, clock) as tier:
        await until(lambda: len(tier) == 2)
        assert await read(tier, 2) is None and (await read(tier, 3) == payload(3)).all()
        assert tier.counts.damaged == 0  # what was erased on purpose is no damage


async def is_gone(folder: Path, clock: FakeClock) -> bool:
    """Whether the next start finds record 2 and no trace of record 1."""
    async with opened(folder, clock) as tier:
        await until(lambda: tier.known(stored(2).id) is not None and not tier._changing.locked())
        return not holds(folder, 1) and tier.known(stored(1).id) is None


async def test_a_copy_that_was_superseded_or_forgotten_is_erased_with_the_newest_one(tmp_path):
    clock = FakeClock()
    async with opened(tmp_path, clock) as tier:
        await wrote(tier, 1, 2)
        tier.forget(stored(1).id)
        await wrote(tier, 1)
        await tier.erase([stored(1).id])
    assert await is_gone(tmp_path, clock)


async def test_copies_that_a_crash_left_behind_in_mid_move_are_erased_together(tmp_path):
    clock = FakeClock()
    files = SegmentFiles(tmp_path, SEGMENT, direct=False)
    place = files.append(stored(1), payload(1))
    files.append(stored(2), payload(2))
    jobs.move(files, [(place, 5_000.0)])  # and the former segment was not removed any more
    files.close()
    async with opened(tmp_path, clock) as tier:
        await until(lambda: len(tier) == 2)
        assert tier._index.get(stored(1).id).place != place
        await tier.erase([stored(1).id])
    assert await is_gone(tmp_path, clock)


async def test_what_no_sync_confirmed_is_erased_too(tmp_path, monkeypatch):
    clock = FakeClock()
    async with opened(tmp_path, clock) as tier:
        await wrote(tier, 2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
            await wrote(tier, 1)
        assert tier.known(stored(1).id) is None and holds(tmp_path, 1) and tier.counts.failed == 1
        await tier.erase([stored(1).id])
    assert await is_gone(tmp_path, clock)


async def test_nothing_counts_as_erased_while_a_removed_segment_cannot_be_deleted(tmp_path, monkeypatch):
    clock = FakeClock()
    async with opened(tmp_path, clock) as tier:
        await wrote(tier, *range(1, 8))
        former, kept = (tier._index.get(stored(index).id).place for index in (1, 2))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
            async with tier._changing:
                await tier._move([(former, 5_000.0), (kept, 5_000.0)])
                await tier._remove(former.segment)
            assert tier._index.get(stored(1).id).place.segment != former.segment and holds(tmp_path, 1)
            with pytest.raises(OSError, match="Read-only"):
                await tier.erase([stored(1).id])
        await tier.erase([stored(1).id])
    assert await is_gone(tmp_path, clock)


@pytest.mark.parametrize("erase_first", [False, True])
async def test_an_erased_record_that_waited_to_be_written_is_not_written_until_it_comes_again(tmp_path, erase_first):
    async with opened(tmp_path, FakeClock()) as tier:
        await wrote(tier, 1)
        async with tier._changing:  # the writer waits, with its batch or still for one
            erasing = asyncio.ensure_future(tier.erase([stored(3).id])) if erase_first else None
            await asyncio.sleep(0)
            tier.offer(stored(2), payload(2), lambda: None)
            tier.offer(stored(3), payload(3), lambda: None)
            await until(lambda: erase_first or tier.queued == 0)
            erasing = erasing or asyncio.ensure_future(tier.erase([stored(3).id]))
            await asyncio.sleep(0)
        await erasing
        async with asyncio.timeout(10.0):
            await tier.drained()
        assert not holds(tmp_path, 3) and tier.known(stored(3).id) is None and holds(tmp_path, 2)
        await wrote(tier, 3)
        assert (await read(tier, 3) == payload(3)).all()


async def test_verifying_forgets_what_is_damaged_and_is_no_use_of_the_rest(tmp_path):
    clock = FakeClock()
    async with opened(tmp_path, clock) as tier:
        await wrote(tier, 1, 2)
        place = tier._index.get(stored(1).id).place
        descriptor = os.open(tmp_path / f"{place.segment:012d}.segment", os.O_RDWR)
        os.pwrite(descriptor, b"\xff\x00\xff", place.offset + place.nbytes - PAGE)
        os.close(descriptor)
        before = tier.known(stored(2).id)
        clock.advance(10.0)
        assert not await tier.verify(stored(1).id) and await tier.verify(stored(2).id)
        assert tier.known(stored(1).id) is None and tier.known(stored(2).id) == before
        assert tier.counts.damaged == 1
        assert await tier.verify(stored(1).id)  # nothing is there that could be wrong


async def test_a_head_is_told_without_its_payload(tmp_path):
    async with opened(tmp_path, FakeClock()) as tier:
        await wrote(tier, 1)
        assert await tier.head(stored(1).id) == stored(1) and await tier.head(stored(2).id) is None


def test_a_page_that_says_erased_is_believed_only_whole_and_in_its_own_segment():
    page = pack_erased(3 * PAGE, 7)
    assert len(page) == PAGE and erased_bytes(page, 7) == 3 * PAGE
    assert erased_bytes(page, 8) is None and erased_bytes(page[:20], 7) is None
    for at in range(32):
        flipped = bytearray(page)
        flipped[at] ^= 1
        assert erased_bytes(bytes(flipped), 7) is None
