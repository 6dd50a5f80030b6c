"""Regions: the engine's cache memory as the link knows it. Registered once, read by every write to a store or peer."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.pool import CachePool
from fabric.kvlink import Link, Region


@dataclass(frozen=True, slots=True)
class PoolRegions:
    """`slots` is None for a model without window groups: then there is no such memory."""

    pool: CachePool
    blocks: Region
    slots: Region | None

    @classmethod
    def register(cls, link: Link, pool: CachePool) -> PoolRegions:
        """To be called once per link."""
        slots = link.register(pool.host_slots) if pool.layout.windows else None
        return cls(pool, link.register(pool.host_blocks), slots)
