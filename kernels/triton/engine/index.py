"""The lightning indexer on a GPU: scores of every visible key, and the best of them exactly."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import IndexerSpec, Pages, Ragged, RopeTable, Selection
from kernels.reference.top_k import top_k
from kernels.staging import staged
from kernels.triton.engine.rows import turned

_KEYS = 64


def index_topk(
    queries: Tensor, projected: Tensor, spec: IndexerSpec, ragged: Ragged, pages: Pages, rope: RopeTable
) -> Selection:
    """As reference.index.index_topk."""
    rows, on = len(queries), staged(ragged, queries.device)
    most, pairs = on.tables.shape[1] * pages.entries, rope.cos.shape[1]
    wide = max(16, triton.next_power_of_2(spec.width))
    heads = queries.new_empty(rows, spec.heads * spec.width)
    _turn_heads[(rows, spec.heads)](
        queries, queries.stride(0), spec.query_column, on.positions, rope.cos, rope.sin, heads, HEADS=spec.heads,
        WIDTH=spec.width, PAIRS=pairs, WIDE=wide, num_warps=1,
    )  # fmt: skip
    scores = queries.new_empty(rows, -(-most // 4) * 4)
    _score[(rows, triton.cdiv(scores.shape[1], _KEYS))](
        heads, projected, projected.stride(0), spec.weight_column, on.positions, on.sequences, on.tables,
        on.tables.stride(0), pages.storage, pages.storage.stride(0), pages.offset, scores, scores.stride(0),
        spec.width**-0.5, spec.heads**-0.5, HEADS=spec.heads, WIDTH=spec.width, ENTRIES=pages.entries,
        RATE=pages.rate, KEYS=_KEYS, BLOCK=max(16, triton.next_power_of_2(spec.heads)), WIDE=wide, num_warps=4,
    )  # fmt: skip
    visible = (on.positions + 1) // pages.rate
    chosen = top_k(scores, spec.topk, visible)
    return Selection(chosen.clamp_min(0), visible.clamp_max(spec.topk))


@triton.jit
def _turn_heads(
    queries, stride, column, positions, cosine, sine, out, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, head, channel = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    value = tl.load(queries + row * stride + column + head * WIDTH + channel, mask=channel < WIDTH, other=0.0)
    at = tl.maximum(tl.load(positions + row), 0).to(tl.int64)
    value = turned(value, at, cosine, sine, channel, 1.0, WIDTH, PAIRS, WIDE)
    tl.store(out + (row * HEADS + head) * WIDTH + channel, value, mask=channel < WIDTH)


@triton.jit
def _score(
    heads, projected, stride, column, positions, sequences, tables, table_stride, storage, page_stride, offset, scores,
    score_stride, key_scale, head_scale, HEADS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
    RATE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores of KEYS entries for one row; those it cannot see are left as they are."""
    row, entry = tl.program_id(0).to(tl.int64), tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    visible = (tl.load(positions + row) + 1) // RATE
    if tl.program_id(1) * KEYS < visible:
        head, channel = tl.arange(0, BLOCK), tl.arange(0, WIDE)
        wide, inside = (channel < WIDTH)[None, :], entry < visible
        mask = (head < HEADS)[:, None] & wide
        asked = tl.load(heads + (row * HEADS + head)[:, None] * WIDTH + channel[None, :], mask=mask, other=0.0)
        share = tl.load(projected + row * stride + column + head, mask=head < HEADS, other=0.0) * head_scale
        table = tables + tl.load(sequences + row).to(tl.int64) * table_stride
        page = tl.load(table + entry // ENTRIES, mask=inside, other=0).to(tl.int64)
        places = storage + page * page_stride + offset + (entry % ENTRIES) * WIDTH
        keys = tl.load(places[:, None] + channel[None, :], mask=inside[:, None] & wide, other=0.0).to(tl.float32)
        dots = tl.dot(asked, tl.trans(keys), input_precision="ieee") * key_scale
        found = tl.sum(tl.maximum(dots, 0.0) * share[:, None], 0)
        tl.store(scores + row * score_stride + entry, found, mask=inside)
