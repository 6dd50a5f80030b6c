"""Prefill and decode on a GPU or on the CPU, in any pair: KV goes through pinned host memory, and no token changes."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.families.tiny import write
from engine.requests import PrefillRequest
from tests.support.driving import GREEDY, handoff, run, tokens_of, whole

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NANO = Path(__file__).parents[3] / "models" / "nano"
LENGTHS = (1, 127, 300)


def opened(folder: Path, device: str) -> Engine:
    config = EngineConfig(
        folder,
        num_blocks=12,
        num_slots=8,
        max_sequences=2,
        device=device,
        kernels="auto" if device == "cuda" else "reference",
    )
    return Engine.open(config, allocate=lambda count: np.zeros(count, np.uint8))


@pytest.mark.parametrize("family", ["v3", "nano"])
@pytest.mark.parametrize("pair", ["cuda cuda", "cuda cpu", "cpu cuda"])
def test_disaggregated_equals_whole_token_for_token(family: str, pair: str, tmp_path: Path) -> None:
    folder = NANO if family == "nano" else write(family, tmp_path / "model")
    source, target = (opened(folder, device) for device in pair.split())
    alone = opened(folder, "cuda")
    assert source.pool.is_apart == pair.startswith("cuda")
    for length in LENGTHS:
        prompt = tuple(3 + (11 * place) % 431 for place in range(length))
        first, _ = handoff(source, target, PrefillRequest("r", prompt, GREEDY, cache=False))
        assert [first.token, *tokens_of(run(target), "r")] == whole(alone, prompt, cache=False)


def test_memory_is_pinned_as_long_as_a_pool_lives() -> None:
    engine = opened(NANO, "cuda")
    rows = torch.from_numpy(engine.pool.host_blocks)
    assert rows.is_pinned()
    del engine
    gc.collect()
    torch.cuda.synchronize()
    assert not rows.is_pinned()
