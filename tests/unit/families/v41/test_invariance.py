"""Batch invariance: a row's bits depend on its own sequence alone, not on chunks, neighbours or places."""

from __future__ import annotations

import pytest
import torch

from engine.families.v41.model import V41
from engine.families.v41.options import Options
from tests.support.tiny import Piece, batch_of, fresh_pool, random_tokens, run_in_chunks
from tests.unit.families.test_v4_invariance import cached_bytes
from tests.unit.families.v41.material import DATA, opened

LENGTHS = (70, 1, 33, 16, 90, 5)
PROMPTS = [random_tokens(length, 100 + length, vocabulary=511) for length in LENGTHS]
Alone = list[tuple[torch.Tensor, list[bytes]]]


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.slow), "quantized"])
def family(request: pytest.FixtureRequest) -> V41:
    dtype = torch.bfloat16 if request.param == "bf16" else torch.float32
    return opened(DATA / "tiny-q", options=Options(fake_quantize=request.param == "quantized"), dtype=dtype)


@pytest.fixture(scope="module")
def alone(family: V41) -> Alone:
    """Each prompt in one piece, by itself."""
    results = []
    for tokens in PROMPTS:
        pool = fresh_pool(family)
        logits = run_in_chunks(family, pool, tokens, len(tokens))
        results.append((logits, cached_bytes(family, pool, len(tokens), 0, 0)))
    return results


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunk_size_changes_no_bit(chunk: int, family: V41, alone: Alone) -> None:
    for tokens, (logits, cached) in zip(PROMPTS, alone, strict=True):
        pool = fresh_pool(family)
        assert torch.equal(run_in_chunks(family, pool, tokens, chunk), logits)
        assert cached_bytes(family, pool, len(tokens), 0, 0) == cached


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 3, 1, 4, 0, 2)])
@pytest.mark.parametrize("chunk", [7, 64])
def test_neighbours_and_places_change_no_bit(chunk: int, order: tuple[int, ...], family: V41, alone: Alone) -> None:
    """Sequences advance together, each by another chunk size, so that prefill pieces and decode steps mix."""
    pool, done, logits = fresh_pool(family), dict.fromkeys(order, 0), {i: [] for i in order}
    while any(done[i] < LENGTHS[i] for i in order):
        pieces, taking = [], []
        for place, i in enumerate(order):
            step = min(chunk if place % 2 == 0 else 1 + chunk // 2, LENGTHS[i] - done[i])
            if step:
                taking.append((i, step))
                pieces.append(Piece(PROMPTS[i][done[i] : done[i] + step], done[i], range(i * 8, i * 8 + 8), i))
        rows = family.forward(batch_of(pieces), pool).split([step for _, step in taking])
        for (i, step), part in zip(taking, rows, strict=True):
            logits[i].append(part)
            done[i] += step
    for i in order:
        assert torch.equal(torch.cat(logits[i]), alone[i][0])
        assert cached_bytes(family, pool, LENGTHS[i], i * 8, i) == alone[i][1]


def test_threads_change_no_bit(family: V41, alone: Alone) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(run_in_chunks(family, fresh_pool(family), PROMPTS[0], 16), alone[0][0])
    finally:
        torch.set_num_threads(before)
