"""The cache pool: extents tile its bytes in the layout's order, and views are the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cache.pool import CachePool
from engine.layout import CacheGroup, GroupKind, Layout

LAYOUT = Layout(
    block_tokens=8,
    max_rollback=2,
    groups=(
        CacheGroup("first", GroupKind.GLOBAL, 2, 2, 4, 12, "bfloat16", "1"),
        CacheGroup("second", GroupKind.GLOBAL, 1, 1, 8, 8, "float32", "1"),
        CacheGroup("ring", GroupKind.WINDOW, 3, 5, 1, 12, "bfloat16", "1"),
        CacheGroup("state", GroupKind.WINDOW, 1, 4, 1, 16, "float32", "1"),
    ),
)


@pytest.fixture
def pool() -> CachePool:
    return CachePool(LAYOUT, 3, 4, torch.bfloat16)


def test_extents_tile_blocks_and_slots_in_layout_order(pool: CachePool) -> None:
    pool.blocks[1] = torch.arange(LAYOUT.block_bytes, dtype=torch.uint8)
    joined = np.concatenate([pool.block_extent("first", 1), pool.block_extent("second", 1)])
    assert joined.tolist() == list(range(LAYOUT.block_bytes))
    pool.slots[2] = torch.arange(LAYOUT.window_bytes).to(torch.uint8)
    joined = np.concatenate([pool.slot_extent("ring", 2), pool.slot_extent("state", 2)])
    assert joined.tolist() == pool.slots[2].tolist()


def test_extents_are_writable_views(pool: CachePool) -> None:
    pool.block_extent("second", 2)[:] = 7
    assert pool.blocks[2, -8:].tolist() == [7] * 8
    assert pool.blocks[1].sum() == 0


@pytest.mark.parametrize(("name", "layer", "entry"), [("first", 1, 1), ("second", 0, 0)])
def test_a_page_view_addresses_the_records_of_its_extent(pool: CachePool, name: str, layer: int, entry: int) -> None:
    pages, group = pool.pages(name, layer), LAYOUT.group(name)
    first = pages.offset + entry * pages.width
    pages.storage[1, first : first + pages.width] = 1.0
    records = pool.block_extent(name, 1).reshape(group.layers, group.entries, group.record_bytes)
    assert records[layer, entry].any()
    assert int(np.count_nonzero(records.any(-1))) == 1


def test_a_ring_view_addresses_the_rows_of_its_extent(pool: CachePool) -> None:
    ring, group = pool.ring("ring", 2), LAYOUT.group("ring")
    first = ring.offset + 3 * ring.width
    ring.storage[1, first : first + ring.width] = 1.0
    rows = pool.slot_extent("ring", 1).reshape(group.layers, group.entries, group.record_bytes)
    assert rows[2, 3].any()
    assert int(np.count_nonzero(rows.any(-1))) == 1
    assert ring.array.dtype == np.uint16
    assert ring.array[1, first] == 0x3F80


def test_copying_a_slot_copies_all_of_it_and_nothing_else(pool: CachePool) -> None:
    pool.slots[0] = 9
    pool.copy_slot(0, 3)
    assert (pool.slots[3] == 9).all()
    assert pool.slots[1:3].sum() == 0
