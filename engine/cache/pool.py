"""Cache pool: the bytes of every cached record, as two tensors. Knows extents; knows neither owners nor models."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from engine.cache.staging import Allocate, HostCopy
from engine.errors import InvalidParameter
from engine.layout import CacheGroup, GroupKind, Layout
from kernels.operands import CPU, Pages, Ring

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


_ALIGNED = 256  # bytes between rows of a device are a multiple, for kernels that copy 16 at a time


class CachePool:
    """Blocks hold GLOBAL groups and slots hold WINDOW groups, group after group, each `[layer][entry]`.

    `blocks` is uint8 `[num_blocks, layout.block_bytes]`, `slots` uint8 `[num_slots, layout.window_bytes]`, both on
    `device`. A fresh pool is zero: entries nobody wrote are never read. `host_blocks` and `host_slots` are what
    transports register, and extents views into them: on the CPU the same memory, asked for from `allocate`. Elsewhere
    they are pinned memory of the same shape, which only a pool with `allocate` has: `fetch` brings what the device has
    written there, `upload` what the host has.
    """

    def __init__(
        self, layout: Layout, num_blocks: int, num_slots: int, dtype: torch.dtype,
        device: torch.device = CPU, allocate: Allocate | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.dtype = layout, dtype
        apart = _is_apart(device)
        self.blocks = _zeros(num_blocks, layout.block_bytes, device, allocate)
        self.slots = _zeros(num_slots, layout.window_bytes, device, allocate)
        self._copies = [HostCopy(rows, allocate) for rows in (self.blocks, self.slots)] if apart and allocate else []
        self._host = [copy.rows for copy in self._copies] or [_on_host(self.blocks), _on_host(self.slots)]
        self._offsets = {**_offsets(layout.globals), **_offsets(layout.windows)}
        self._pages = {group.name: self._page_views(group) for group in layout.globals}
        self._rings = {group.name: self._ring_views(group) for group in layout.windows}

    @property
    def host_blocks(self) -> np.ndarray:
        """uint8 `[num_blocks, layout.block_bytes]`. Raises InvalidParameter where the host has none."""
        return _mapped(self._host[0])

    @property
    def host_slots(self) -> np.ndarray:
        """uint8 `[num_slots, layout.window_bytes]`. Raises InvalidParameter where the host has none."""
        return _mapped(self._host[1])

    @property
    def is_apart(self) -> bool:
        """Whether the host's rows are another memory than the device's, so that `fetch` and `upload` copy."""
        return bool(self._copies)

    def fetch(self, blocks: Iterable[int], slots: Iterable[int] = ()) -> None:
        """What the device's rows hold, behind everything it was told to do so far, into the host's. Waits for it."""
        for copy, rows in zip(self._copies, (blocks, slots), strict=False):
            copy.fetch(rows)

    def upload(self, blocks: Iterable[int], slots: Iterable[int] = ()) -> None:
        """What the host's rows hold into the device's, before everything it is told to do from now on. Waits for it."""
        for copy, rows in zip(self._copies, (blocks, slots), strict=False):
            copy.upload(rows)

    def block_extent(self, group: str, block: int) -> np.ndarray:
        """Writable uint8 view of one GLOBAL group's host bytes in one block. Raises as `host_blocks`."""
        first = self._offsets[group]
        return self.host_blocks[block, first : first + self.layout.group(group).extent_bytes]

    def slot_extent(self, group: str, slot: int) -> np.ndarray:
        """Writable uint8 view of one WINDOW group's host bytes in one slot. Raises as `host_slots`."""
        first = self._offsets[group]
        return self.host_slots[slot, first : first + self.layout.group(group).extent_bytes]

    def row_of(self, group: str, index: int) -> tuple[int, int]:
        """First byte and size of one extent in `host_blocks` or `host_slots`, from the start of that storage."""
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


def _is_apart(device: torch.device) -> bool:
    return device.type != "cpu"


def _zeros(rows: int, width: int, device: torch.device, allocate: Allocate | None) -> torch.Tensor:
    if _is_apart(device):
        return torch.zeros(rows, -(-width // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=device)[:, :width]
    if allocate is None or not rows * width:
        return torch.zeros(rows, width, dtype=torch.uint8, device=device)
    return torch.from_numpy(allocate(rows * width)).view(rows, width)


def _on_host(storage: torch.Tensor) -> np.ndarray | None:
    return storage.numpy() if storage.device.type == "cpu" else None


def _mapped(array: np.ndarray | None) -> np.ndarray:
    if array is None:
        raise InvalidParameter("device", "this pool is not in the host's memory", "open the engine with `allocate`")
    return array


def _offsets(groups: tuple[CacheGroup, ...]) -> dict[str, int]:
    """First byte of each group within a block or slot."""
    offsets, total = {}, 0
    for group in groups:
        offsets[group.name] = total
        total += group.extent_bytes
    return offsets
