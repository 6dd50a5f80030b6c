"""Cache pool: the bytes of every cached record, as two tensors. Knows extents; knows neither owners nor models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.errors import InvalidParameter
from engine.layout import CacheGroup, GroupKind, Layout
from kernels.operands import CPU, Pages, Ring

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Zeroed host memory of so many bytes, uint8 [n], of a kind that its maker knows a use for.
Allocate = Callable[[int], np.ndarray]


class CachePool:
    """Blocks hold GLOBAL groups and slots hold WINDOW groups, group after group, each `[layer][entry]`.

    `blocks` is uint8 `[num_blocks, layout.block_bytes]`, `slots` uint8 `[num_slots, layout.window_bytes]`; transports
    register the two as they are. A fresh pool is zero: entries nobody wrote are never read. Both are on `device`;
    extents are views that the host writes, so only a pool on the CPU has them, and only such a one asks `allocate` for
    its memory.
    """

    def __init__(
        self, layout: Layout, num_blocks: int, num_slots: int, dtype: torch.dtype,
        device: torch.device = CPU, allocate: Allocate | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.dtype = layout, dtype
        self.blocks = _zeros(num_blocks, layout.block_bytes, device, allocate)
        self.slots = _zeros(num_slots, layout.window_bytes, device, allocate)
        self._block_bytes, self._slot_bytes = _on_host(self.blocks), _on_host(self.slots)
        self._offsets = {**_offsets(layout.globals), **_offsets(layout.windows)}
        self._pages = {group.name: self._page_views(group) for group in layout.globals}
        self._rings = {group.name: self._ring_views(group) for group in layout.windows}

    def block_extent(self, group: str, block: int) -> np.ndarray:
        """Writable uint8 view of one GLOBAL group's bytes in one block. Raises InvalidParameter off the CPU."""
        first = self._offsets[group]
        return _mapped(self._block_bytes)[block, first : first + self.layout.group(group).extent_bytes]

    def slot_extent(self, group: str, slot: int) -> np.ndarray:
        """Writable uint8 view of one WINDOW group's bytes in one slot. Raises InvalidParameter off the CPU."""
        first = self._offsets[group]
        return _mapped(self._slot_bytes)[slot, first : first + self.layout.group(group).extent_bytes]

    def row_of(self, group: str, index: int) -> tuple[int, int]:
        """First byte and size of one extent in `blocks` or `slots`, counted from the start of that storage."""
        declared = self.layout.group(group)
        row = self.layout.block_bytes if declared.kind is GroupKind.GLOBAL else self.layout.window_bytes
        return index * row + self._offsets[group], declared.extent_bytes

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy every window group of one slot over another: taking or restoring an anchor."""
        self.slots[dst] = self.slots[src]

    def pages(self, group: str, layer: int) -> Pages:
        """One layer of a GLOBAL group; `layer` counts within the group."""
        return self._pages[group][layer]

    def ring(self, group: str, layer: int) -> Ring:
        """One layer of a WINDOW group; `layer` counts within the group."""
        return self._rings[group][layer]

    def _page_views(self, group: CacheGroup) -> list[Pages]:
        typed, array, first, width = self._typed(group)
        step, rate = group.entries * width, group.tokens_per_entry
        return [Pages(typed, array, first + layer * step, group.entries, width, rate) for layer in range(group.layers)]

    def _ring_views(self, group: CacheGroup) -> list[Ring]:
        typed, array, first, width = self._typed(group)
        step = group.entries * width
        return [Ring(typed, array, first + layer * step, group.entries, width) for layer in range(group.layers)]

    def _typed(self, group: CacheGroup) -> tuple[torch.Tensor, np.ndarray | None, int, int]:
        """The storage in the group's own type, as tensor and array, with the group's offset and width in elements."""
        dtype = _TORCH[group.dtype]
        storage = self.blocks if group.kind is GroupKind.GLOBAL else self.slots
        typed = storage.view(dtype)
        array = _on_host(storage.view(torch.uint16 if dtype == torch.bfloat16 else dtype))
        return typed, array, self._offsets[group.name] // dtype.itemsize, group.record_bytes // dtype.itemsize


def _zeros(rows: int, width: int, device: torch.device, allocate: Allocate | None) -> torch.Tensor:
    if allocate is None or device.type != "cpu" or not rows * width:
        return torch.zeros(rows, width, dtype=torch.uint8, device=device)
    return torch.from_numpy(allocate(rows * width)).view(rows, width)


def _on_host(storage: torch.Tensor) -> np.ndarray | None:
    return storage.numpy() if storage.device.type == "cpu" else None


def _mapped(array: np.ndarray | None) -> np.ndarray:
    if array is None:
        raise InvalidParameter("device", "this pool is not in the host's memory", "copy from and to its tensors")
    return array


def _offsets(groups: tuple[CacheGroup, ...]) -> dict[str, int]:
    """First byte of each group within a block or slot."""
    offsets, total = {}, 0
    for group in groups:
        offsets[group.name] = total
        total += group.extent_bytes
    return offsets
