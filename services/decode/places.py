"""Places: where each extent of one handoff goes in the engine's pool. Knows both sides' paging; copies nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine.cache.pool import CachePool
from engine.layout import CacheGroup, GroupKind
from engine.requests import HeldKV
from fabric.errors import InvalidArgument
from fabric.kvlink.extents import Extents
from fabric.kvlink.link import Bytes
from fabric.kvlink.verify import Destination
from services.worker.extents import extent_view
from services.worker.geometry import Handoff


class Places:
    """Called with (group, block, size) of an extent as its writer counts them.

    `handoff` is in the writer's blocks, `kv` and the first `held_tokens` tokens, which nobody may write to, in ours.
    """

    def __init__(self, pool: CachePool, handoff: Handoff, kv: HeldKV, held_tokens: int) -> None:
        self._pool, self._handoff, self._kv, self._held_tokens = pool, handoff, kv, held_tokens
        self._groups = {group.name: group for group in handoff.layout.groups}
        self._same_paging = handoff.layout.block_tokens == pool.layout.block_tokens
        self._table = np.array(kv.block_table, np.int64)

    def __call__(self, group: str, block: int, size: int) -> Destination:
        """Raises InvalidArgument for an extent that this handoff does not have."""
        written = self._groups.get(group)
        if written is None or size != written.extent_bytes or not self._is_asked_for(written, block):
            raise InvalidArgument(f"{size} bytes of block {block} of {group!r} were not asked for", field="extents")
        if self._same_paging or written.kind is GroupKind.WINDOW:
            return extent_view(self._pool, group, block, self._kv)
        return tuple(self._runs(written, block))

    def all(self, extents: Extents) -> NDArray[np.uint64] | None:
        """Addresses of many extents; None where the sides page differently, or one of them is not asked for."""
        if not self._same_paging:
            return None
        table = extents.table
        addresses = np.empty(len(table), np.uint64)
        for number, name in enumerate(extents.groups):
            own = table["group"] == number
            group = self._groups.get(name)
            if group is None or (table["size"][own] != group.extent_bytes).any():
                return None
            found = self._addresses(group, table["block"][own])
            if found is None:
                return None
            addresses[own] = found
        return addresses

    def _addresses(self, group: CacheGroup, blocks: NDArray[np.uint32]) -> NDArray[np.uint64] | None:
        """Of one group's extents in these blocks; None where one is not asked for."""
        if group.kind is GroupKind.WINDOW:
            asked, storage = blocks == 0, self._pool.host_slots
            rows = np.full(len(blocks), self._kv.slot)
        else:
            asked = (blocks >= self._handoff.first_block) & (blocks < self._handoff.blocks)
            storage = self._pool.host_blocks
            rows = self._table[np.where(asked, blocks, 0)]
        if not asked.all():
            return None
        first, second = (self._pool.row_of(group.name, index)[0] for index in (0, 1))
        addresses: NDArray[np.uint64] = (storage.ctypes.data + first + rows * (second - first)).astype(np.uint64)
        return addresses

    def _is_asked_for(self, group: CacheGroup, block: int) -> bool:
        if group.kind is GroupKind.WINDOW:
            return block == 0
        return self._handoff.first_block <= block < self._handoff.blocks

    def _runs(self, written: CacheGroup, block: int) -> Iterator[Bytes]:
        """Runs of whole entries in the order of the writer's extent, layer after layer."""
        record, first = written.record_bytes, block * written.entries
        here = self._pool.layout.group(written.name).entries
        held = self._held_tokens // written.tokens_per_entry
        for layer in range(written.layers):
            entry = first
            while entry < first + written.entries:
                into, row = divmod(entry, here)
                count = min(here - row, first + written.entries - entry)
                unused = entry < held or into >= len(self._kv.block_table)
                start = (layer * here + row) * record
                yield (
                    np.empty(count * record, np.uint8)
                    if unused
                    else self._pool.block_extent(written.name, self._kv.block_table[into])[start:][: count * record]
                )
                entry += count
