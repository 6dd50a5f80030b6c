"""What the store is held against reads every byte, and a stand-in for fio never passes for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.kvstore_worker import chain
from bench.kvstore_yardsticks import Reader, median_ratio


def script(folder: Path, body: str) -> str:
    """A program that plays fio; returns its path."""
    path = folder / "fio"
    path.write_text(f"#!{sys.executable}\nimport sys, json\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a:1", tmp_path / "b"]
    for path in paths:
        path.write_bytes(bytes(3 << 20))
    return paths


def test_without_fio_files_are_read_here_and_the_table_says_so(files):
    reader = Reader.found("no-such-program-anywhere")
    assert "no fio" in reader.name and reader.rate(files, direct=False) > 0


def test_fio_is_asked_for_a_sequential_read_of_just_these_files_and_its_own_figures_count(files, tmp_path):
    figures = {"jobs": [{"read": {"io_bytes": 6 << 20, "runtime": 500}}]}
    asking = f"open({str(tmp_path / 'asked')!r}, 'w').write(json.dumps(sys.argv[1:]))"
    body = f"{asking}\nprint('note')\nprint({json.dumps(figures)!r})"
    reader = Reader.found(script(tmp_path, body))
    assert reader.name == "fio" and reader.rate(files, direct=True) == (6 << 20) / 0.5
    asked = json.loads((tmp_path / "asked").read_text())
    assert {"--rw=read", "--bs=1M", "--direct=1", "--readonly", "--file_service_type=sequential"} <= set(asked)
    assert f"--filename={str(files[0]).replace(':', chr(92) + ':')}:{files[1]}" in asked


def test_what_fio_complains_of_is_told(files, tmp_path):
    reader = Reader.found(script(tmp_path, "print('no such engine', file=sys.stderr)\nsys.exit(3)"))
    with pytest.raises(RuntimeError, match="no such engine"):
        reader.rate(files, direct=False)


def test_ratios_are_of_one_round_each():
    assert median_ratio([(1.0, 2.0), (30.0, 10.0), (2.0, 2.0)]) == 1.0


def test_equal_beginnings_have_equal_keys_and_nothing_after_a_difference_does():
    one, other = chain([1, 2, 3, 4], 16), chain([1, 2, 9, 4], 16)
    assert [a.key == b.key for a, b in zip(one, other, strict=True)] == [True, True, False, False]
    assert [block.parent for block in one] == [bytes(32), *(block.key for block in one[:-1])]
    assert all(len(block.name.tokens) == 4 * 16 for block in one), "a token is four bytes"
    assert one[1].name.tokens != one[2].name.tokens
