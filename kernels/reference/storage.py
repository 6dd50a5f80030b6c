"""Reading and writing cached records in torch: rings of recent rows and pages of compressed entries."""

from __future__ import annotations

import torch

from kernels.operands import Pages, Ragged, Ring
from kernels.reference.records import index_values, latents, packed_latents


def store_rows(rows: torch.Tensor, column: int, ragged: Ragged, ring: Ring) -> None:
    """Write columns `column .. + ring.width` of each sequence's last rows into its ring, in the ring's own type."""
    for s, slot in enumerate(ragged.slots):
        first, end, context = int(ragged.starts[s]), int(ragged.starts[s + 1]), int(ragged.context[s])
        positions = range(max(context, context + end - first - ring.capacity), context + end - first)
        source = [first + p - context for p in positions]
        _ring(ring, int(slot))[[p % ring.capacity for p in positions]] = rows[source, column : column + ring.width].to(
            ring.storage.dtype
        )


def history(rows: torch.Tensor, s: int, ragged: Ragged, ring: Ring, positions: range) -> torch.Tensor:
    """Rows [positions, width] of sequence s: from this batch's `rows` where they are new, else from its ring."""
    first, context = int(ragged.starts[s]), int(ragged.context[s])
    ringed = _ring(ring, int(ragged.slots[s]))
    return torch.stack([rows[first + p - context] if p >= context else ringed[p % ring.capacity] for p in positions])


def entries(s: int, ragged: Ragged, pages: Pages, count: int) -> torch.Tensor:
    """The first `count` entries [count, width] of sequence s, in page order; of records, what they hold in fp32."""
    blocks = torch.from_numpy(ragged.tables[s]).long()[: -(-count // pages.entries)]
    held = _paged(pages)[blocks].flatten(0, 1)[:count]
    if not pages.are_records:
        return held
    return latents(held) if pages.scales is None else index_values(held, entries(s, ragged, pages.scales, count))


def store_entry(s: int, ragged: Ragged, pages: Pages, index: int, value: torch.Tensor) -> None:
    """Write entry `index` of sequence s: into pages of latents' records as one of them."""
    if pages.are_records and value.dtype != torch.uint8:
        value = packed_latents(value[None])[0]
    _paged(pages)[int(ragged.tables[s, index // pages.entries]), index % pages.entries] = value.to(pages.storage.dtype)


def _ring(ring: Ring, slot: int) -> torch.Tensor:
    extent = ring.storage[slot, ring.offset : ring.offset + ring.capacity * ring.width]
    return extent.view(ring.capacity, ring.width)


def _paged(pages: Pages) -> torch.Tensor:
    extent = pages.storage[:, pages.offset : pages.offset + pages.entries * pages.width]
    return extent.unflatten(1, (pages.entries, pages.width))
