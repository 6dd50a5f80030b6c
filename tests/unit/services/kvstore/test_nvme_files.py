"""Segment files give back what was written and nothing else: cut, flipped, foreign and half-written bytes are none."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.errors import StartError
from fabric.kvlink.verify import digest
from fabric.records import Extent
from services.kvstore.nvme.files import Place, SegmentFiles, Target
from services.kvstore.nvme.format import PAGE, Head, Stored, pack_head, padded, parse_head
from services.kvstore.records import ROOT, Identity, RecordId, RecordKind
from tests.support import procs

SIZE = 10_000
SEGMENT = 8 * PAGE


def payload(index: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, size, dtype=np.uint8)


def stored(index: int, size: int = SIZE) -> Stored:
    """A record of two groups."""
    data, half = payload(index, size), size // 2
    extents = tuple(
        Extent(group, 0, 1, start, end - start, digest(data[start:end]))
        for group, start, end in (("latent", 0, half), ("index", half, size))
    )
    name = RecordId(RecordKind.BLOCK, bytes([index]) * 32)
    return Stored(name, Identity("rev", "layout"), bytes([index]) * 512, ROOT, size, extents, 1_000.0 + index)


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
def files(request: pytest.FixtureRequest, tmp_path: Path):
    opened = SegmentFiles(tmp_path / "kv", SEGMENT, request.param)
    yield opened
    opened.close()


def everything(files: SegmentFiles) -> list[tuple[Place, Head] | None]:
    return [item for number in files.numbers for item in files.scan(number)]


def test_what_was_written_is_read_and_found_again(files, tmp_path):
    places = [files.append(stored(index), payload(index)) for index in range(10)]
    assert len(files.numbers) > 2 and all(place.offset % PAGE == 0 for place in places)
    files.sync()
    for index, place in enumerate(places):
        head, data = files.read(place)
        assert head.stored == stored(index) and (data == payload(index)).all()
    found = everything(files)
    assert [item[0] for item in found] == places
    assert [item[1].stored for item in found] == [stored(index) for index in range(10)]


def test_a_record_larger_than_a_page_of_header_is_found_too(files):
    long = replace(stored(1), tokens=bytes(3 * PAGE))
    place = files.append(long, payload(1))
    assert files.read(place)[0].stored == long and everything(files)[0][1].stored == long


def aligned(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, padded(nbytes)), np.uint8)


def read_into(files: SegmentFiles, place: Place, size: int, room: np.ndarray) -> Head | None:
    (head,) = files.read_run([Target(place, size, room)])
    return head


@pytest.mark.parametrize("where", [0, 8], ids=["whole pages", "any address"])
@pytest.mark.parametrize("damaged", [None, 0, 2, 4])
def test_neighbours_are_read_at_once_and_damage_to_one_costs_it_alone(tmp_path, monkeypatch, where, damaged):
    sizes = [SIZE, PAGE, 1, 3 * PAGE - 1, SIZE]
    for direct in (False, True):
        files = SegmentFiles(tmp_path / str(direct), 100 * PAGE, direct)
        places = [files.append(stored(index, size), payload(index, size)) for index, size in enumerate(sizes)]
        files.sync()
        if damaged is not None:
            with (tmp_path / str(direct) / f"{places[0].segment:012d}.segment").open("r+b") as file:
                file.seek(places[damaged].offset + 40)
                file.write(b"\xff\xff")
        rooms = [aligned(size + where)[where:] for size in sizes]
        reads, real = [], os.preadv
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", lambda *given: (reads.append(1), real(*given))[1])  # noqa: B023
            heads = files.read_run([Target(*each) for each in zip(places, sizes, rooms, strict=True)])
        for index, (head, room, size) in enumerate(zip(heads, rooms, sizes, strict=True)):
            assert (head is None) == (index == damaged)
            assert head is None or (head.stored == stored(index, size) and (room[:size] == payload(index, size)).all())
        copied = direct and where
        assert copied or len(reads) == 1 + (damaged is not None)
        files.close()


@pytest.mark.parametrize("where", [0, 8], ids=["whole pages", "any address"])
def test_a_payload_is_read_where_it_belongs(files, where):
    places = [files.append(stored(index, size), payload(index, size)) for index, size in enumerate((SIZE, PAGE, 1))]
    for index, (place, size) in enumerate(zip(places, (SIZE, PAGE, 1), strict=True)):
        room = aligned(size + where)[where:]
        assert read_into(files, place, size, room).stored == stored(index, size)
        assert (room[:size] == payload(index, size)).all()
        assert read_into(files, place, size + 1, aligned(size + 1)) is None  # it is a record of another size


def test_whole_pages_past_the_page_cache_take_one_read_and_no_copy(tmp_path, monkeypatch):
    files = SegmentFiles(tmp_path, SEGMENT, direct=True)
    place, room, reads = files.append(stored(1), payload(1)), aligned(SIZE), []
    files.sync()
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: (reads.append(given[1]), real(*given))[1])
    assert read_into(files, place, SIZE, room) is not None and (room[:SIZE] == payload(1)).all()
    assert len(reads) == 1 and np.shares_memory(np.frombuffer(reads[0][1], np.uint8), room)
    files.close()


def first_version(index: int, size: int, segment: int, tokens: bytes) -> bytes:
    """A record as it was written before payloads started on a page of their own."""
    head = pack_head(replace(stored(index, size), tokens=tokens), segment)
    prelude, header = b"DIKVREC1" + head[8:28], head[36:]
    seal = xxhash.xxh3_64_intdigest(prelude + header).to_bytes(8, "little")
    packed = prelude + seal + header + payload(index, size).tobytes()
    return packed.ljust(padded(len(packed)), b"\0")


@pytest.mark.parametrize("size", [PAGE // 2, PAGE, SIZE, 5 * PAGE - 900])
@pytest.mark.parametrize("tokens", [4, 1000, 4500])
@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
def test_records_of_the_first_version_are_found_and_read(tmp_path, size, tokens, direct):
    written = [first_version(index, size, 1, bytes(tokens)) for index in (1, 2)]
    (tmp_path / f"{1:012d}.segment").write_bytes(b"".join(written))
    files = SegmentFiles(tmp_path, SEGMENT, direct)
    found = everything(files)
    assert [head.stored.id for _, head in found] == [stored(1).id, stored(2).id]
    assert [place.nbytes for place, _ in found] == [len(each) for each in written]
    for index, (place, head) in enumerate(found, start=1):
        room = aligned(size)
        assert read_into(files, place, size, room) == head and (room[:size] == payload(index, size)).all()
        assert (files.read(place)[1] == payload(index, size)).all()
    files.close()


def test_a_damaged_stretch_costs_its_records_alone(files, tmp_path):
    places = [files.append(stored(index), payload(index)) for index in range(3)]
    path = tmp_path / "kv" / f"{places[1].segment:012d}.segment"
    with path.open("r+b") as file:
        file.seek(places[1].offset + 20)
        file.write(b"\xff")
    found = everything(files)
    assert [item and item[0] for item in found] == [places[0], None, places[2]]
    assert files.read(places[1]) is None


@pytest.mark.parametrize("kept", [0, 10, PAGE, SIZE, PAGE + SIZE - 1, PAGE + SIZE])
def test_a_tail_that_was_cut_off_is_no_record(files, tmp_path, kept):
    files.append(stored(1), payload(1))
    last = files.append(stored(2), payload(2))
    os.truncate(tmp_path / "kv" / f"{last.segment:012d}.segment", last.offset + kept)
    found = [item for item in everything(files) if item is not None]
    whole = kept >= PAGE + SIZE  # all of its payload is there, only zeros are missing
    assert [item[1].stored.id for item in found] == [stored(1).id, *([stored(2).id] if whole else [])]
    assert (files.read(last) is not None) == whole


def test_after_a_write_that_failed_nothing_is_appended_behind_it(tmp_path, monkeypatch):
    files = SegmentFiles(tmp_path, 100 * PAGE, direct=False)
    first = files.append(stored(1), payload(1))
    real = os.pwritev
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda descriptor, parts, offset: real(descriptor, parts[:1], offset))
        with pytest.raises(OSError, match="part"):
            files.append(stored(2), payload(2))
    third = files.append(stored(3), payload(3))
    assert third.segment > first.segment
    assert [item[1].stored.id for item in everything(files) if item is not None] == [stored(1).id, stored(3).id]
    files.close()


def test_a_segment_goes_when_its_last_reader_has(tmp_path):
    files = SegmentFiles(tmp_path, SEGMENT, direct=False)
    place = files.append(stored(1), payload(1))
    with files._reading(place.segment) as segment:
        files.remove(place.segment)
        assert not segment.path.exists()
        assert len(os.pread(segment.descriptor, PAGE, 0)) == PAGE  # whoever reads it, reads it to the end
    with pytest.raises(OSError):
        os.fstat(segment.descriptor)
    with pytest.raises(KeyError):
        files.read(place)
    assert files.append(stored(2), payload(2)).segment > place.segment
    files.close()


def test_a_directory_has_one_owner_and_numbers_are_not_used_twice(tmp_path):
    files = SegmentFiles(tmp_path, SEGMENT, direct=False)
    place = files.append(stored(1), payload(1))
    with pytest.raises(StartError, match="another kvstore"):
        SegmentFiles(tmp_path, SEGMENT, direct=False)
    files.close()
    again = SegmentFiles(tmp_path, SEGMENT, direct=False)
    assert (again.read(place)[1] == payload(1)).all()
    assert again.append(stored(2), payload(2)).segment == place.segment + 1
    again.close()


def test_a_directory_that_another_process_has_is_refused_until_that_one_is_gone(tmp_path):
    command = [sys.executable, "-m", "tests.support.segment_writer", str(tmp_path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=procs.ROOT) as writer:
        assert writer.stdout is not None and writer.stdout.readline()
        with pytest.raises(StartError, match="another kvstore"):
            SegmentFiles(tmp_path, SEGMENT, direct=False)
        writer.kill()
    files = SegmentFiles(tmp_path, SEGMENT, direct=False)
    assert files.numbers
    files.close()


def test_two_owners_whom_a_shared_volume_both_let_in_never_write_one_segment(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # locks of one host that another one does not see
    owners = [SegmentFiles(tmp_path, SEGMENT, direct=False) for _ in range(2)]
    written: list[dict[int, int]] = [{}, {}]
    for index in range(60):
        for owner, segments in zip(owners, written, strict=True):
            with suppress(FileExistsError):  # the other one has this name: the next one is tried
                place = owner.append(stored(index), payload(index))
                segments[place.segment] = index
                assert (owner.read(place)[1] == payload(index)).all()
    assert all(len(segments) > 3 for segments in written) and not written[0].keys() & written[1].keys()
    for owner in owners:
        owner.close()


def test_a_volume_without_locks_is_told_as_such(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StartError, match="cannot be locked: No locks available"):
        SegmentFiles(tmp_path, SEGMENT, direct=False)


def test_a_directory_that_cannot_be_used_is_told_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError) as caught:
        SegmentFiles(tmp_path / "file", SEGMENT, direct=False)
    assert caught.value.field == "nvme_dir" and caught.value.fix


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_flipped_cut_or_foreign_head_is_taken(data: st.DataObject) -> None:
    whole = pack_head(stored(1), 7)
    assert parse_head(whole, 7) is not None and parse_head(whole, 8) is None
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(whole)
    flipped[at] ^= 1 << bit
    assert parse_head(bytes(flipped), 7) is None
    assert parse_head(whole[: data.draw(st.integers(0, len(whole) - 1))], 7) is None


@given(st.binary(max_size=200))
def test_random_bytes_are_no_head(noise: bytes) -> None:
    assert parse_head(noise, 7) is None and parse_head(b"DIKVREC1" + noise, 7) is None


def test_extents_that_leave_a_byte_unchecked_are_no_record() -> None:
    one, two = stored(1).extents
    for extents in ((one,), (two,), (one, replace(two, size=two.size - 1)), (one, replace(two, offset=two.offset + 1))):
        assert parse_head(pack_head(replace(stored(1), extents=extents), 7), 7) is None
