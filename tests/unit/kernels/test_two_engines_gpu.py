"""Two engines of one process on streams of their own: each gives the tokens that it gives alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from tests.unit.kernels.test_engine_gpu import greedy
from tests.unit.kernels.test_engine_records_gpu import opened, write

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")]
ROUNDS, PROMPTS = 3, 12


def test_engines_whose_launches_overlap_give_the_tokens_they_give_alone(tmp_path: Path) -> None:
    """Over records, whose choice of keys leaves candidates of a row in a workspace between blocks of threads."""
    folder = write("v32", tmp_path / "model")
    engines = [opened(folder, "cuda", "cuda") for _ in range(2)]
    alone = [greedy(engine, prompts=PROMPTS) for engine in engines]
    torch.cuda.synchronize()
    found: list[list[object]] = [[], []]
    both = threading.Barrier(2, timeout=60)

    def serve(place: int, engine: Engine) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(ROUNDS):
                both.wait()
                found[place].append(greedy(engine, prompts=PROMPTS))

    threads = [threading.Thread(target=serve, args=pair) for pair in enumerate(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [[tokens] * ROUNDS for tokens in alone]
