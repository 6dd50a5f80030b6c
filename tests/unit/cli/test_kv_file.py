"""An exported file says what it holds, and every byte of it that is not as it was written is noticed offline."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cli import kv_file
from cli.kv_file import Contents, FileExtent, FileRecord
from cli.main import app
from fabric.errors import DataLoss, InvalidArgument
from fabric.kvlink.verify import digest

SIZES = (700, 300)
PAYLOAD = np.random.default_rng(0).integers(0, 256, 3 * sum(SIZES), dtype=np.uint8)


def record(number: int, kind: str = "block") -> FileRecord:
    start, keys = number * sum(SIZES), [f"{index:064x}" for index in range(4)]
    extents, at = [], 0
    for group, size in zip(("a", "b"), SIZES, strict=True):
        seal = digest(PAYLOAD[start + at : start + at + size])
        extents.append(FileExtent(group, 1, at, size, f"{seal:016x}"))
        at += size
    key = keys[number + 1] if kind == "block" else keys[number]
    return FileRecord(kind, key, keys[number if kind == "block" else number - 1], start, at, tuple(extents))


CONTENTS = Contents("revision", "layout", (record(0), record(1), record(2, "anchor")))


def write(path: Path, contents: Contents = CONTENTS) -> Path:
    payload = kv_file.create(path, contents)
    payload[:] = PAYLOAD[: len(payload)]
    payload.flush()
    return path


def verified(path: Path) -> int:
    """Exit code of the command."""
    return CliRunner().invoke(app, ["kv", "verify", str(path)]).exit_code


def test_a_whole_file_reads_as_it_was_written_and_belongs_to_its_owner_alone(tmp_path):
    path = write(tmp_path / "file")
    contents, payload = kv_file.read(path)
    assert contents == CONTENTS and (payload == PAYLOAD).all() and contents.blocks == 2
    assert list(kv_file.damaged(contents, payload)) == [None, None, None] and verified(path) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b'token_ids": null' in path.read_bytes()


def test_tokens_are_there_where_they_were_asked_for(tmp_path):
    told = replace(CONTENTS, records=(replace(CONTENTS.records[0], token_ids=(1, 2, 3)),))
    assert kv_file.read(write(tmp_path / "file", told))[0] == told


def test_a_flipped_byte_anywhere_is_noticed(tmp_path):
    whole = write(tmp_path / "whole").read_bytes()
    path = tmp_path / "flipped"
    length = int.from_bytes(whole[8:16], "little")
    start = len(whole) - len(PAYLOAD)
    for at in (*range(0, 24), 24 + length // 2, 24 + length - 1, start, start + len(PAYLOAD) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert verified(path) == 1, f"byte {at}"
    path.write_bytes(whole[:start] + bytes([whole[start] ^ 1]) + whole[start + 1 :])
    assert [bad is not None for bad in kv_file.damaged(*kv_file.read(path))] == [True, False, False]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_was_cut_or_added_to_is_damaged(tmp_path, change):
    path = write(tmp_path / "file")
    whole = path.read_bytes()
    path.write_bytes(whole[:change] if change < 0 else whole + b"x")
    with pytest.raises(DataLoss):
        kv_file.read(path)
    assert verified(path) == 1


@pytest.mark.parametrize(
    "records",
    [
        (record(1),),  # does not start the prefix
        (record(0), replace(record(1), parent="f" * 64)),
        (record(0), record(2, "anchor")),  # of another block
        (record(0), replace(record(1), offset=0)),
    ],
)
def test_records_that_do_not_follow_each_other_are_no_prefix(tmp_path, records):
    with pytest.raises(DataLoss, match="does not continue"):
        kv_file.read(write(tmp_path / "file", replace(CONTENTS, records=records)))


def test_bytes_that_belong_to_no_extent_are_damage(tmp_path):
    short = replace(CONTENTS.records[0], extents=CONTENTS.records[0].extents[:1])
    contents = replace(CONTENTS, records=(short,))
    assert list(kv_file.damaged(*kv_file.read(write(tmp_path / "file", contents)))) == [short]


def test_other_files_are_refused_by_name(tmp_path):
    other = tmp_path / "other"
    other.write_text(json.dumps({"format": kv_file.FORMAT}))
    with pytest.raises(InvalidArgument, match="no exported prefix"):
        kv_file.read(other)
    with pytest.raises(InvalidArgument):
        kv_file.read(tmp_path / "absent")
    with pytest.raises(InvalidArgument, match="absent"):
        kv_file.create(tmp_path / "absent" / "file", CONTENTS)
