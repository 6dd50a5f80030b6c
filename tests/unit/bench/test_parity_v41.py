"""V4.1's parity: what ships is found and covered, a wrong folder is refused, and no bar can be missed in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.parity_v41 import found
from bench.parity_v41_published import SHIPPED, engram_rows, format_rows, image_rows, published_rows


def test_every_shipped_record_holds_and_every_control_fails() -> None:
    rows = [*format_rows(), *engram_rows(), *published_rows(None), *image_rows()]
    assert all(row.bar is not None and row.holds for row in rows), [row for row in rows if not row.holds]
    assert sum(row.better == ">=" for row in rows) == 3


def test_another_published_total_is_a_miss(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    text = (SHIPPED / "flash-config.json").read_text(encoding="utf-8")
    config.write_text(text.replace('"head_dim": 512', '"head_dim": 480'), encoding="utf-8")
    assert [row.holds for row in published_rows(config)] == [False, False, True, True]


def test_a_folder_without_the_checkpoint_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []
    assert found(tmp_path, refused.append) is None
    assert "v41-tiny" in refused[0]


@pytest.mark.parametrize(
    "name", ["tiny-q", "tiny-q-logits.safetensors", "quant-cases.safetensors", "flash-config.json"]
)
def test_what_parity_reads_ships(name: str) -> None:
    assert (SHIPPED / name).exists()


def test_the_shipped_records_are_small() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()) <= 8 * 2**20
