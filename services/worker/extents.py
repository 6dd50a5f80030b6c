"""Extents in the engine's pool: the one place that knows which view of the pool belongs to a named extent."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.cache.pool import CachePool
from engine.layout import GroupKind
from engine.requests import HeldKV


def extent_view(pool: CachePool, group: str, block: int, kv: HeldKV) -> npt.NDArray[np.uint8]:
    """Writable bytes of one extent of the request whose KV lies at `kv`; `block` counts within the request."""
    if pool.layout.group(group).kind is GroupKind.GLOBAL:
        return pool.block_extent(group, kv.block_table[block])
    return pool.slot_extent(group, kv.slot)
