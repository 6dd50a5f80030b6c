"""Reading and writing cached records in torch: rings of recent rows and pages of compressed entries."""

from __future__ import annotations

import torch

from kernels.operands import IndexMixing, Pages, Ragged, Ring
from kernels.reference.records import index_codes, packed, values_of


def store_rows(rows: torch.Tensor, column: int, ragged: Ragged, ring: Ring) -> None:
    """Write columns `column .. + ring.width` of each sequence's last rows into its ring, in the ring's own type; whole
    rows where it holds records."""
    for s, slot in enumerate(ragged.slots):
        first, end, context = int(ragged.starts[s]), int(ragged.starts[s + 1]), int(ragged.context[s])
        positions = range(max(context, context + end - first - ring.capacity), context + end - first)
        source = [first + p - context for p in positions]
        _put(ring, int(slot), [p % ring.capacity for p in positions], rows[source, column:])


def history(rows: torch.Tensor, s: int, ragged: Ragged, ring: Ring, positions: range) -> torch.Tensor:
    """Rows [positions, width] of sequence s: from this batch's `rows` where they are new, else from its ring."""
    first, context = int(ragged.starts[s]), int(ragged.context[s])
    ringed = _ring(ring, int(ragged.slots[s]))
    if ring.are_records:
        ringed = values_of(ringed, None if ring.scales is None else _ring(ring.scales, int(ragged.slots[s])))
    return torch.stack([rows[first + p - context] if p >= context else ringed[p % ring.capacity] for p in positions])


def entries(s: int, ragged: Ragged, pages: Pages, count: int) -> torch.Tensor:
    """The first `count` entries [count, width] of sequence s, in page order; of records, what they hold in fp32."""
    held = _stored(s, ragged, pages, count)
    if not pages.are_records:
        return held
    return values_of(held, None if pages.scales is None else _stored(s, ragged, pages.scales, count))


def store_entry(s: int, ragged: Ragged, pages: Pages, index: int, value: torch.Tensor) -> None:
    """Write entry `index` of sequence s: into pages of records as one of them."""
    place = int(ragged.tables[s, index // pages.entries]), index % pages.entries
    if pages.are_records:
        value, apart = packed(value[None], pages.width)
        if pages.scales is not None:
            _paged(pages.scales)[place] = apart
    _paged(pages)[place] = value.to(pages.storage.dtype)


def store_mixed(s: int, ragged: Ragged, pages: Pages, index: int, value: torch.Tensor, mixing: IndexMixing) -> None:
    """Write an index key as entry `index` of sequence s: mixed codes, and their scale in pages of its own."""
    place = int(ragged.tables[s, index // pages.entries]), index % pages.entries
    codes, scales = index_codes(value[None], mixing)
    _paged(pages)[place] = codes.view(torch.uint8)
    if pages.scales is not None:
        _paged(pages.scales)[place] = scales


def in_records(rows: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Rows as a ring of records would hold them, fp32; any other holds them as they are."""
    return values_of(*packed(rows, ring.width)) if ring.are_records else rows


def _stored(s: int, ragged: Ragged, pages: Pages, count: int) -> torch.Tensor:
    blocks = torch.from_numpy(ragged.tables[s]).long()[: -(-count // pages.entries)]
    return _paged(pages)[blocks].flatten(0, 1)[:count]


def _put(ring: Ring, slot: int, places: list[int], rows: torch.Tensor) -> None:
    if not ring.are_records:
        _ring(ring, slot)[places] = rows[:, : ring.width].to(ring.storage.dtype)
        return
    records, apart = packed(rows, ring.width)
    _ring(ring, slot)[places] = records
    if ring.scales is not None and apart is not None:
        _ring(ring.scales, slot)[places] = apart


def _ring(ring: Ring, slot: int) -> torch.Tensor:
    extent = ring.storage[slot, ring.offset : ring.offset + ring.capacity * ring.width]
    return extent.view(ring.capacity, ring.width)


def _paged(pages: Pages) -> torch.Tensor:
    extent = pages.storage[:, pages.offset : pages.offset + pages.entries * pages.width]
    return extent.unflatten(1, (pages.entries, pages.width))
