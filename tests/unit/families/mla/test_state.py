"""What V2, V3 and V3.2 cache is all they need: resumed prefixes, rolled-back drafts, and nothing of a neighbour."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.cache.pool import CachePool
from engine.families import Family
from tests.support.tiny_mla import (
    FAMILIES,
    Piece,
    TinySpec,
    batch_of,
    open_tiny,
    poisoned_pool,
    random_tokens,
    run_in_chunks,
    write_tiny,
)

TOKENS = random_tokens(112, 21)
SAME = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return open_tiny(write_tiny(tmp_path_factory.mktemp(request.param), TinySpec(request.param, seed=5)))


@pytest.fixture(scope="module")
def clean(family: Family) -> torch.Tensor:
    return run_in_chunks(family, poisoned_pool(family), TOKENS, len(TOKENS))


def resumed(family: Family, boundary: int, dropped: str) -> torch.Tensor:
    """Logits after `boundary` on another pool, in other blocks, with one group's bytes left out."""
    source, target = poisoned_pool(family), CachePool(family.layout, 64, 8, torch.float32)
    run_in_chunks(family, source, TOKENS[:boundary], 16)
    for group in family.layout.groups:
        for block in range(family.layout.blocks_for(boundary)):
            if group.name != dropped:
                target.block_extent(group.name, 30 + block)[:] = source.block_extent(group.name, block)
    return run_in_chunks(family, target, TOKENS, 16, boundary, first_block=30, slot=5)


@pytest.mark.parametrize("boundary", [64, 66, 80, 81])
def test_a_resumed_prefix_continues_as_if_never_interrupted(boundary: int, family: Family, clean: torch.Tensor) -> None:
    assert (resumed(family, boundary, "nothing") - clean[boundary:]).abs().max() <= SAME


@pytest.mark.parametrize("boundary", [64, 81])
def test_a_prefix_without_any_one_group_shows(boundary: int, family: Family, clean: torch.Tensor) -> None:
    for group in family.layout.groups:
        assert (resumed(family, boundary, group.name) - clean[boundary:]).abs().max() > 0.05


@pytest.mark.parametrize("rejected", range(1, 9))
def test_rejected_drafts_leave_no_trace(rejected: int, family: Family, clean: torch.Tensor) -> None:
    pool, position = poisoned_pool(family), 47
    run_in_chunks(family, pool, TOKENS[:position], 16)
    drafts = random_tokens(rejected, rejected)
    blocks = range(family.layout.blocks_for(len(TOKENS)))
    family.forward(batch_of([Piece(drafts, position, blocks, 0)]), pool)
    found = run_in_chunks(family, pool, TOKENS, 5, position)
    assert (found - clean[position:]).abs().max() <= SAME


def test_unwritten_memory_is_never_read(family: Family) -> None:
    logits = run_in_chunks(family, poisoned_pool(family), TOKENS, 13)  # the pool is full of NaN
    assert torch.isfinite(logits).all()


def test_a_batch_outside_the_cache_is_refused_before_any_work(family: Family) -> None:
    with pytest.raises(ValueError, match="needs 3"):
        family.forward(batch_of([Piece([5] * 40, 0, range(2), 0)]), poisoned_pool(family))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layout_is_one_row_per_token_and_layer(name: str, tmp_path: Path) -> None:
    layout = open_tiny(write_tiny(tmp_path, TinySpec(name))).layout
    sizes = {group.name: (group.layers, group.entries, group.record_bytes) for group in layout.groups}
    expected = {"latent": (4, 16, (32 + 16) * 4)} | ({"index_key": (4, 16, 32 * 4)} if name == "v32" else {})
    assert (sizes, layout.windows, layout.window_bytes) == (expected, (), 0)
