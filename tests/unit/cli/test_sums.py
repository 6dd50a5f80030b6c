"""Every byte of a model folder against its SHA256SUMS: what differs is named with its fix."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cli import sums
from cli.doctor import Finding, Health
from models import nano

CONTENT = {"config.json": b"{}", "model.safetensors": bytes(9_000_000)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in CONTENT.items()]
    (tmp_path / sums.NAME).write_text("".join(lines))
    return tmp_path


def verified(folder: Path) -> Finding:
    return sums.verify(folder, lambda done, total: None)


def test_a_whole_folder_is_fine_and_progress_reaches_the_end(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    finding = sums.verify(folder, lambda done, total: told.append((done, total)))
    assert finding.health is Health.OK and "2 files" in finding.detail
    assert told[-1] == (9_000_002, 9_000_002) and len(told) > 2


def test_one_flipped_bit_is_found_and_its_file_named(folder: Path) -> None:
    content = bytearray(CONTENT["model.safetensors"])
    content[7_654_321] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    finding = verified(folder)
    assert finding.health is Health.FAIL and str(folder / "model.safetensors") in finding.detail and finding.fix


def test_a_missing_and_an_unlisted_file_are_named(folder: Path) -> None:
    (folder / "extra.safetensors").write_bytes(b"x")
    assert "does not list extra.safetensors" in verified(folder).detail
    (folder / "config.json").unlink()
    finding = verified(folder)
    assert finding.health is Health.FAIL and "config.json is missing" in finding.detail


@pytest.mark.parametrize("line", ["nonsense", f"{'0' * 64}  ../config.json", f"{'0' * 63}  config.json"])
def test_a_line_that_is_none_is_named_and_nothing_outside_is_read(folder: Path, line: str) -> None:
    with (folder / sums.NAME).open("a") as file:
        file.write(line + "\n")
    finding = verified(folder)
    assert finding.health is Health.FAIL and "line 3" in finding.detail


def test_without_sums_it_says_how_to_make_them(folder: Path) -> None:
    (folder / sums.NAME).unlink()
    finding = verified(folder)
    assert finding.health is Health.WARN and "sha256sum *.json *.safetensors" in finding.fix


def test_nano_is_what_its_sums_say() -> None:
    finding = verified(Path(nano.__file__).parent)
    assert finding.health is Health.OK, finding.detail
