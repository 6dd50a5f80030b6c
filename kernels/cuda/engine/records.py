"""Published records on Hopper: latents are packed into pages and attended where they lie.

Formats: reference/records.py. A record's bytes depend on its row alone; so do mixtures where the split is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cuda import sparse_decode as sparse
from kernels.cuda.engine import named
from kernels.cuda.mqa_logits import multiprocessors
from kernels.cuda.spans import Split, workspace_for
from kernels.operands import MlaSpec, Pages, Ragged, RopeTable, Selection
from kernels.reference.kv_record import Norm, Packed, Paged, Turn
from kernels.reference.sparse_decode import VALUE_WIDTH, RecordKind, SparseCache
from kernels.staging import staged
from kernels.triton.engine import latent as by_triton
from kernels.triton.kv_record import pack

_AT_ONCE = 64  # rows whose sums of spans are held at a time, where the split is given


def extent(pages: Pages) -> Tensor:
    """All entries of one layer where they lie, [blocks, entries * width]."""
    return pages.storage[:, pages.offset : pages.offset + pages.entries * pages.width]


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
    rows, heads = query.shape[:2]
    indices, counts = named.entries_of(ragged, pages, selection, pages.entries, 0, 1)
    out = query.new_empty(rows, heads, VALUE_WIDTH)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
    for first in range(0, rows, rows if span is None else _AT_ONCE):
        part = slice(first, None if span is None else first + _AT_ONCE)
        cache = SparseCache(RecordKind.V32, extent(pages), pages.entries, indices[part], counts[part])
        split = _split(len(out[part]), heads, sparse.padded_keys(cache, None), span, query.device)
        room = workspace_for(split, len(out[part]), heads, query.device)
        sparse.sparse_decode(query[part], cache, None, None, spec.scale, out[part], lse[part], split, room)
    return out


def _split(rows: int, heads: int, keys: int, span: int | None, device: torch.device) -> Split:
    if span is None:
        return sparse.split_for(rows, heads, keys, multiprocessors(device.index))
    return Split(span, max(1, -(-keys // span)))
