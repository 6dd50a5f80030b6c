"""A rank's load takes its own weights and little more, measured from outside in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.load import MOST, measure, write

SMALL = {
    "num_hidden_layers": 12, "first_k_dense_replace": 1, "hidden_size": 512, "moe_intermediate_size": 384,
    "n_routed_experts": 16,
}  # fmt: skip


@pytest.mark.parametrize("block", [None, 64], ids=["bf16", "fp8"])
def test_the_peak_of_a_ranks_load_is_its_weights_and_a_tenth(block: int | None, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", block, SMALL)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    cost = measure(folder, "rank", 1, 2)
    assert 0.5 * stored < cost.weights < 0.6 * stored
    assert cost.weights > 50e6
    assert cost.ratio <= MOST
