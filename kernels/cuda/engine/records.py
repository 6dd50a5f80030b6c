"""Published records on Hopper: rows and entries are packed into their places, and attended where they lie.

Formats: reference/records.py. A record's bytes depend on its row alone; so do mixtures where the split is given.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.cuda import sparse_decode as sparse
from kernels.cuda.engine import index, named
from kernels.cuda.engine.named import Mixed
from kernels.cuda.mqa_logits import multiprocessors
from kernels.cuda.spans import Split, workspace_for
from kernels.operands import CompressorSpec, MlaSpec, Pages, Ragged, Ring, RopeTable, Selection
from kernels.reference.kv_record import Norm, Packed, Paged, Turn
from kernels.reference.records import attended_kind, packed_kind
from kernels.reference.sparse_decode import VALUE_WIDTH, SparseCache
from kernels.staging import once, staged
from kernels.triton.engine import compress as entries_by_triton
from kernels.triton.engine import latent as by_triton
from kernels.triton.kv_record import pack

_AT_ONCE = 64  # rows whose sums of spans are held at a time, where the split is given


def extent(part: Pages | Ring) -> Tensor:
    """All entries or rows of one layer where they lie, [blocks or slots, entries * width]."""
    held = part.capacity if isinstance(part, Ring) else part.entries
    return part.storage[:, part.offset : part.offset + held * part.width]


def apart(part: Pages | Ring) -> Tensor | None:
    """Their scales, where these stand apart."""
    return None if part.scales is None else extent(part.scales)


def store_latent(projected: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, rope: RopeTable) -> None:
    """As reference.mla.store_latent."""
    if not pages.are_records:
        by_triton.store_latent(projected, spec, ragged, pages, rope)
        return
    on = staged(ragged, projected.device)
    rows = projected[:, spec.column : spec.column + spec.rank + spec.rope]
    places, turn = Paged(on.positions, on.sequences, on.tables), Turn(on.positions, rope.cos, rope.sin)
    pack(Packed.V32, rows, places, extent(pages), pages.entries, Norm(spec.norm, spec.norm_eps), turn)


def attend_chosen(
    query: Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, selection: Selection | None, span: int | None = None
) -> Tensor:
    """query bf16 [rows, heads, 576] over the chosen records of each row's sequence, or all up to its own: bf16 [rows,
    heads, 512]. `span`: keys of one span, where it is not to be chosen by how many rows there are."""
    return attend(query, in_pages(ragged, pages, selection), None, spec.scale, span).values


def in_pages(ragged: Ragged, pages: Pages, selection: Selection | None) -> SparseCache:
    """Of each row, the chosen entries of its sequence, or all that are finished."""

    def name() -> tuple[Tensor, Tensor]:
        return named.entries_of(ragged, pages, selection, pages.entries, 0, 1)

    # All entries are those of every layer of this rate.
    on = staged(ragged, pages.storage.device)
    indices, counts = name() if selection is not None else once(on, ("entries", pages.rate), name)
    return SparseCache(attended_kind(pages.width), extent(pages), pages.entries, indices, counts, apart(pages))


def attend(query: Tensor, main: SparseCache, extra: SparseCache | None, scale: float, span: int | None = None) -> Mixed:
    """query bf16 [rows, heads, width] over what the lists name; `span` as `attend_chosen` has it."""
    rows, heads = query.shape[:2]
    out = query.new_empty(rows, heads, VALUE_WIDTH)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
    for first in range(0, rows, rows if span is None else _AT_ONCE):
        part = slice(first, None if span is None else first + _AT_ONCE)
        keys = _rows_of(main, part), extra and _rows_of(extra, part)
        split = _split(len(out[part]), heads, sparse.padded_keys(*keys), span, query.device)
        room = workspace_for(split, len(out[part]), heads, query.device)
        sparse.sparse_decode(query[part], *keys, None, scale, out[part], lse[part], split, room)
    return Mixed(out, lse)


def compress(
    projected: Tensor, spec: CompressorSpec, ragged: Ragged, ring: Ring, pages: Pages, rope: RopeTable
) -> None:
    """As reference.compress.compress."""
    if not pages.are_records:
        entries_by_triton.compress(projected, spec, ragged, ring, pages, rope)
        return
    entries = entries_by_triton.compressed(projected, spec, ragged, ring, rope)
    if spec.mixing is None:
        store_entries(entries, ragged, pages)
    else:
        index.store_mixed(entries, spec.mixing, ragged, pages)


def store_entries(values: Tensor, ragged: Ragged, pages: Pages) -> None:
    """As reference.csa2.store_entries."""
    if not pages.are_records:
        entries_by_triton.store_entries(values, ragged, pages)
        return
    on = staged(ragged, values.device)
    sequences, windows = on.windows[pages.rate]
    places = Paged(windows, sequences, on.tables)
    pack(packed_kind(pages.width), values, places, extent(pages), pages.entries, None, None, apart(pages))


def _rows_of(cache: SparseCache, part: slice) -> SparseCache:
    lengths = None if cache.lengths is None else cache.lengths[part]
    return replace(cache, indices=cache.indices[part], lengths=lengths)


def _split(rows: int, heads: int, keys: int, span: int | None, device: torch.device) -> Split:
    if span is None:
        return sparse.split_for(rows, heads, keys, multiprocessors(device.index))
    return Split(span, max(1, -(-keys // span)))
