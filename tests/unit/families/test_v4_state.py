"""What V4 caches is all it needs: resumed prefixes, rolled-back drafts, and nothing of a neighbour."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.cache.pool import CachePool
from engine.families import Family
from engine.layout import GroupKind
from tests.support.tiny import (
    Piece,
    TinySpec,
    batch_of,
    fresh_pool,
    random_tokens,
    run_in_chunks,
    tiny_family,
    write_tiny,
)

TOKENS = random_tokens(112, 21)
SAME = 1e-4


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return tiny_family(write_tiny(tmp_path_factory.mktemp("tiny"), TinySpec(seed=5)))


@pytest.fixture(scope="module")
def clean(family: Family) -> torch.Tensor:
    return run_in_chunks(family, fresh_pool(family), TOKENS, len(TOKENS))


def resumed(family: Family, boundary: int, dropped: str) -> torch.Tensor:
    """Logits after `boundary` on another pool, in other blocks and another slot, with one group's bytes left out."""
    source, target = fresh_pool(family), CachePool(family.layout, 64, 8, torch.float32)
    run_in_chunks(family, source, TOKENS[:boundary], 16)
    for group in family.layout.groups:
        if group.name == dropped:
            continue
        if group.kind is GroupKind.GLOBAL:
            for block in range(family.layout.blocks_for(boundary)):
                target.block_extent(group.name, 30 + block)[:] = source.block_extent(group.name, block)
        else:
            target.slot_extent(group.name, 5)[:] = source.slot_extent(group.name, 0)
    return run_in_chunks(family, target, TOKENS, 16, boundary, first_block=30, slot=5)


@pytest.mark.parametrize("boundary", [64, 66, 80, 81])
def test_a_resumed_prefix_continues_as_if_never_interrupted(boundary: int, family: Family, clean: torch.Tensor) -> None:
    assert (resumed(family, boundary, "nothing") - clean[boundary:]).abs().max() <= SAME


@pytest.mark.parametrize("boundary", [64, 81])
@pytest.mark.parametrize("dropped", ["csa", "csa_index", "hca", "window", "csa_state", "csa_index_state"])
def test_a_prefix_without_any_one_group_shows(dropped: str, boundary: int, family: Family, clean: torch.Tensor) -> None:
    assert (resumed(family, boundary, dropped) - clean[boundary:]).abs().max() > 0.05


@pytest.mark.parametrize(("boundary", "needed"), [(64, False), (80, False), (66, True), (81, True)])
def test_open_hca_rows_matter_only_inside_a_window(
    boundary: int, needed: bool, family: Family, clean: torch.Tensor
) -> None:
    worst = (resumed(family, boundary, "hca_state") - clean[boundary:]).abs().max()
    assert worst > 0.05 if needed else worst <= SAME


@pytest.mark.parametrize("rejected", range(1, 9))
@pytest.mark.parametrize("position", [30, 47, 61])
def test_rejected_drafts_leave_no_trace(rejected: int, position: int, family: Family, clean: torch.Tensor) -> None:
    pool = fresh_pool(family)
    run_in_chunks(family, pool, TOKENS[:position], 16)
    drafts = random_tokens(rejected, rejected)
    blocks = range(family.layout.blocks_for(len(TOKENS)))
    family.forward(batch_of([Piece(drafts, position, blocks, 0)]), pool)
    found = run_in_chunks(family, pool, TOKENS, 5, position)
    assert (found - clean[position:]).abs().max() <= SAME


def test_a_copied_slot_is_an_anchor(family: Family, clean: torch.Tensor) -> None:
    pool = fresh_pool(family)
    run_in_chunks(family, pool, TOKENS[:64], 64)
    pool.copy_slot(0, 3)
    run_in_chunks(family, pool, TOKENS, 16, 64)
    again = run_in_chunks(family, pool, TOKENS, 16, 64, slot=3)
    assert (again - clean[64:]).abs().max() <= SAME


def test_unwritten_memory_is_never_read(family: Family) -> None:
    logits = run_in_chunks(family, fresh_pool(family), TOKENS, 13)  # the pool is full of NaN
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": range(2)}, "needs 3"),
        ({"blocks": (0, 1, 64)}, "block_tables"),
        ({"slot": 8}, "slots"),
        ({"tokens": [512] * 40}, "tokens"),
        ({"context": 2040, "blocks": range(64)}, "positions"),
    ],
)
def test_a_batch_outside_the_cache_is_refused_before_any_work(
    change: dict[str, object], message: str, family: Family
) -> None:
    fields = {"tokens": [5] * 40, "context": 0, "blocks": range(3), "slot": 0} | change
    with pytest.raises(ValueError, match=message):
        family.forward(batch_of([Piece(**fields)]), fresh_pool(family))  # type: ignore[arg-type]


def test_positions_must_go_on_from_the_context(family: Family) -> None:
    batch = batch_of([Piece([5, 6], 0, range(1), 0)])
    batch.positions[1] = 7
    with pytest.raises(ValueError, match="do not go on"):
        family.forward(batch, fresh_pool(family))


def test_the_layout_counts_every_layer_and_row(tmp_path: Path) -> None:
    layout = tiny_family(write_tiny(tmp_path)).layout
    sizes = {group.name: (group.layers, group.entries, group.record_bytes) for group in layout.groups}
    assert layout.block_tokens == 16
    assert sizes == {
        "csa": (3, 4, 64 * 4),
        "csa_index": (3, 4, 32 * 4),
        "hca": (2, 1, 64 * 4),
        "window": (7, 16 + 8, 64 * 4),
        "csa_state": (3, 8 + 8, 4 * 64 * 4),
        "csa_index_state": (3, 8 + 8, 4 * 32 * 4),
        "hca_state": (2, 16 + 8, 2 * 64 * 4),
    }
