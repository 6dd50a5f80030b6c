"""Batch invariance: a row's bits depend on its own sequence alone, not on chunks, neighbours or places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.cache.pool import CachePool
from engine.families import Family
from tests.support.tiny_mla import (
    FAMILIES,
    WIDE,
    Piece,
    TinySpec,
    batch_of,
    open_tiny,
    poisoned_pool,
    random_tokens,
    run_in_chunks,
    write_tiny,
)

LENGTHS = (70, 1, 33, 16, 90, 5)
PROMPTS = [random_tokens(length, 100 + length) for length in LENGTHS]
Results = list[tuple[torch.Tensor, list[bytes]]]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide latents: outside the invariant mode long chunks would take the un-absorbed form."""
    return write_tiny(tmp_path_factory.mktemp(request.param), TinySpec(request.param, 7, WIDE))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def family(request: pytest.FixtureRequest, folder: Path) -> Family:
    return open_tiny(folder, dtype=request.param, batch_invariant=True)


def cached_bytes(family: Family, pool: CachePool, tokens: int, first_block: int) -> list[bytes]:
    """Every valid record of one sequence, by group, block and layer."""
    found = []
    for group in family.layout.groups:
        for block in range(family.layout.blocks_for(tokens)):
            extent = pool.block_extent(group.name, first_block + block).reshape(group.layers, group.entries, -1)
            left = tokens - block * family.layout.block_tokens
            found.append(extent[:, : group.valid_entries(left)].tobytes())
    return found


@pytest.fixture(scope="module")
def alone(family: Family) -> Results:
    """Each prompt in one piece, by itself."""
    results = []
    for tokens in PROMPTS:
        pool = poisoned_pool(family)
        logits = run_in_chunks(family, pool, tokens, len(tokens))
        results.append((logits, cached_bytes(family, pool, len(tokens), 0)))
    return results


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 64])
def test_chunk_size_changes_no_bit(chunk: int, family: Family, alone: Results) -> None:
    for tokens, (logits, cached) in zip(PROMPTS, alone, strict=True):
        pool = poisoned_pool(family)
        assert torch.equal(run_in_chunks(family, pool, tokens, chunk), logits)
        assert cached_bytes(family, pool, len(tokens), 0) == cached


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 0, 4), (1, 3)])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_neighbours_and_places_change_no_bit(
    chunk: int, order: tuple[int, ...], family: Family, alone: Results
) -> None:
    """Sequences advance together, each by another chunk size, so that prefill pieces and decode steps mix."""
    pool, done, logits = poisoned_pool(family), dict.fromkeys(order, 0), {i: [] for i in order}
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
        assert cached_bytes(family, pool, LENGTHS[i], i * 8) == alone[i][1]


def test_threads_change_no_bit(family: Family, alone: Results) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(run_in_chunks(family, poisoned_pool(family), PROMPTS[0], 16), alone[0][0])
    finally:
        torch.set_num_threads(before)
