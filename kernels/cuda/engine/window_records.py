"""Rows of a window as published records on Hopper: packed into rings, and attended together with entries.

Few new rows of a sequence are in their ring before they are attended (`Ring.takes_first`). Of more, a ring would lose
rows that the first of them see: they are attended in a page of their own, with the rows before them behind them.
Formats: reference/records.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.engine import named, records
from kernels.operands import AttentionSpec, Pages, Ragged, Ring, RopeTable, Selection, Staged
from kernels.reference.kv_record import Paged
from kernels.reference.records import attended_kind, packed_kind
from kernels.reference.sparse_decode import SparseCache
from kernels.staging import once, staged
from kernels.triton.engine import rows as by_triton
from kernels.triton.engine.attend import turn_queries
from kernels.triton.kv_record import pack

_LANES, _WORD = 128, 4


def store_rows(rows: Tensor, column: int, ragged: Ragged, ring: Ring) -> None:
    """As reference.storage.store_rows."""
    if not ring.are_records:
        by_triton.store_rows(rows, column, ragged, ring)
        return
    on = staged(ragged, rows.device)
    (places,) = once(on, ("places", ring.capacity), lambda: (_placed(on, ring.capacity),))
    held, apart, slots = records.extent(ring), records.apart(ring), on.slots.view(-1, 1)
    at = Paged(places, on.sequences, slots)  # a slot is the only page of its sequence
    pack(packed_kind(ring.width), rows[:, column:], at, held, ring.capacity, None, None, apart)


def attend(
    queries: Tensor, fresh: Tensor, spec: AttentionSpec, ragged: Ragged, ring: Ring, pages: Pages | None,
    selection: Selection | None, rope: RopeTable, span: int | None = None,
) -> Tensor:  # fmt: skip
    """As reference.attend.attend, over records. `span`: keys of one span, where it is not to be chosen by how many rows
    there are."""
    query = turn_queries(queries, spec, ragged, rope, torch.bfloat16)
    if ring.takes_first(ragged, spec.window):
        main = _in_ring(ragged, ring, spec.window)
    else:
        main = _in_page(fresh, ragged, ring, spec.window)
    extra = None if pages is None else records.in_pages(ragged, pages, selection)
    mixed = records.attend(query, main, extra, spec.width**-0.5, span)
    return named.joined([mixed], spec, ragged, rope)


def _placed(on: Staged, capacity: int) -> Tensor:
    """Each row's place in its ring, int32 [rows]; -1 where it has none."""
    count, places = len(on.positions), torch.empty_like(on.positions)
    _places[(triton.cdiv(count, _LANES),)](
        on.positions, on.sequences, on.starts, on.context, on.slots, places, count, CAPACITY=capacity, LANES=_LANES,
        num_warps=4,
    )  # fmt: skip
    return places


def _in_ring(ragged: Ragged, ring: Ring, window: int) -> SparseCache:
    """The window of each row, all of it in its ring."""
    indices = _named(ragged, window, ring.capacity, 0, ring.storage.device)
    kind = attended_kind(ring.width)
    return SparseCache(kind, records.extent(ring), ring.capacity, indices, None, records.apart(ring))


def _in_page(fresh: Tensor, ragged: Ragged, ring: Ring, window: int) -> SparseCache:
    """The window of each row in one page: `fresh` rows packed, then of every sequence the window - 1 rows before."""
    on, new, before = staged(ragged, fresh.device), len(fresh), window - 1
    sequences = len(on.slots)
    total, apart = new + sequences * before, 0 if ring.scales is None else ring.scales.width
    room = torch.empty(1, -(-total * (ring.width + apart) // 16) * 16, dtype=torch.uint8, device=fresh.device)
    held = room[:, : total * ring.width]
    scales = room[:, total * ring.width : total * (ring.width + apart)] if apart else None
    order = torch.arange(new, device=fresh.device)
    pack(packed_kind(ring.width), fresh, order, held, total, None, None, scales)
    words, given = room.view(torch.int32), ring if ring.scales is None else ring.scales
    stored, beside = ring.storage.view(torch.int32), given.storage.view(torch.int32)
    if before:
        _copy[(sequences, before)](
            on.context, on.slots, stored, stored.stride(0), ring.offset // _WORD, beside, beside.stride(0),
            given.offset // _WORD, words, total * ring.width // _WORD, new, before, CAPACITY=ring.capacity,
            WORDS=ring.width // _WORD, APART=apart // _WORD, WIDE=triton.next_power_of_2(ring.width // _WORD),
            num_warps=2,
        )  # fmt: skip
    indices = _named(ragged, window, 0, new, fresh.device)
    return SparseCache(attended_kind(ring.width), held, total, indices, None, scales)


def _named(ragged: Ragged, window: int, capacity: int, new: int, device: torch.device) -> Tensor:
    """int32 [rows, window]: places in rings of `capacity`, or in a page of `new` rows (`capacity` 0), -1 for none. They
    are those of every layer."""
    on = staged(ragged, device)
    return once(on, ("window", window, capacity, new), lambda: (_name(on, window, capacity, new),))[0]


def _name(on: Staged, window: int, capacity: int, new: int) -> Tensor:
    rows = len(on.positions)
    indices = torch.empty(rows, window, dtype=torch.int32, device=on.positions.device)
    _name_window[(rows,)](
        on.positions, on.sequences, on.starts, on.context, on.slots, on.floors, indices, new, WINDOW=window,
        CAPACITY=capacity, LANES=triton.next_power_of_2(window), num_warps=1,
    )  # fmt: skip
    return indices


@triton.jit
def _places(
    positions, sequences, starts, contexts, slots, places, rows, CAPACITY: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """A row's place in its ring; -1 where it is nobody's or a later row of the batch has that place."""
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = row < rows
    at = tl.load(positions + row, mask=inside, other=-1)
    sequence = tl.maximum(tl.load(sequences + row, mask=inside, other=0), 0)
    first, last = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    end = tl.load(contexts + sequence) + last - first
    kept = (at >= 0) & (tl.load(slots + sequence) >= 0) & (at >= end - CAPACITY)
    tl.store(places + row, tl.where(kept, at % CAPACITY, -1), mask=inside)


@triton.jit
def _name_window(
    positions, sequences, starts, contexts, slots, floors, indices, new, WINDOW: tl.constexpr, CAPACITY: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at = tl.load(positions + row)
    sequence = tl.maximum(tl.load(sequences + row), 0)
    position = tl.maximum(tl.load(floors + sequence), at - WINDOW + 1) + lane
    inside = (at >= 0) & (position <= at)
    if CAPACITY > 0:
        place = tl.maximum(tl.load(slots + sequence), 0) * CAPACITY + position % CAPACITY
    else:
        since = position - tl.load(contexts + sequence)
        before = new + (sequence + 1) * (WINDOW - 1) + since
        place = tl.where(since >= 0, tl.load(starts + sequence) + since, before)
    tl.store(indices + row * WINDOW + lane, tl.where(inside, place, -1), mask=lane < WINDOW)


@triton.jit
def _copy(
    contexts, slots, stored, stride, offset, beside, beside_stride, beside_offset, room, apart_at, new, before,
    CAPACITY: tl.constexpr, WORDS: tl.constexpr, APART: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row before a batch out of its ring, words of 4 bytes; what stands apart goes behind all rows."""
    sequence, number, word = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDE)
    position = tl.load(contexts + sequence) - before + number
    slot = tl.load(slots + sequence).to(tl.int64)
    if (position >= 0) & (slot >= 0):
        place, target = position % CAPACITY, (new + sequence * before + number).to(tl.int64)
        value = tl.load(stored + slot * stride + offset + place * WORDS + word, mask=word < WORDS, other=0)
        tl.store(room + target * WORDS + word, value, mask=word < WORDS)
        if APART > 0:
            value = tl.load(beside + slot * beside_stride + beside_offset + place * APART + word, mask=word < APART)
            tl.store(room + apart_at + target * APART + word, value, mask=word < APART)
