"""Rows of a device's memory on the host: whole rows go either way, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cache import pool
from engine.cache.pool import CachePool
from engine.cache.staging import HostCopy
from tests.support.fakefamily import LAYOUT


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.uint8)


@pytest.mark.parametrize("rows", [[], [0], [4, 2, 3], [0, 2, 2, 5], range(6)])
def test_the_named_rows_are_copied_either_way(rows: list[int]) -> None:
    device = torch.arange(6 * 16, dtype=torch.uint8).view(6, 16)
    copy, named = HostCopy(device, zeros), np.isin(np.arange(6), list(rows))
    copy.fetch(rows)
    assert (copy.rows[named] == device.numpy()[named]).all() and not copy.rows[~named].any()
    copy.rows[:] = 255
    before = device.clone()
    copy.upload(rows)
    assert (device.numpy()[named] == 255).all() and (device.numpy()[~named] == before.numpy()[~named]).all()


def test_a_pool_apart_has_extents_where_it_is_given_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_is_apart", lambda _device: True)
    group, given = LAYOUT.globals[0].name, []

    def allocate(count: int) -> np.ndarray:
        given.append(zeros(count))
        return given[-1]

    made = CachePool(LAYOUT, 3, 2, torch.float32, allocate=allocate)
    made.block_extent(group, 1)[:] = 7
    assert np.shares_memory(made.host_blocks, given[0]) and not made.blocks.any()
    made.upload([1])
    first, size = made.row_of(group, 1)
    assert bool((made.blocks.flatten()[first : first + size] == 7).all())


def test_a_pool_of_the_host_copies_nothing() -> None:
    made = CachePool(LAYOUT, 3, 2, torch.float32)
    made.blocks.fill_(3)
    assert not made.is_apart and made.host_blocks.ctypes.data == made.blocks.data_ptr()
    made.fetch([0])
    made.upload([1])
    assert bool((made.blocks == 3).all())
