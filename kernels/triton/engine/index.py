"""The lightning indexer on a GPU: scores of every visible key, and the best of them exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import IndexerSpec, IndexKeySpec, Pages, Ragged, RopeTable, Selection
from kernels.reference.top_k import top_k
from kernels.staging import staged
from kernels.triton.engine.index_records import score_records
from kernels.triton.engine.rows import turned

_KEYS = 64
TopK: TypeAlias = Callable[[Tensor, int, Tensor | None], Tensor]
"""As reference.top_k.top_k."""


def index_topk(
    queries: Tensor, projected: Tensor, spec: IndexerSpec, ragged: Ragged, pages: Pages, rope: RopeTable,
    top_k: TopK = top_k,
) -> Selection:  # fmt: skip
    """As reference.index.index_topk."""
    on = staged(ragged, queries.device)
    heads = turn_heads(queries, spec.query_column, spec.heads, spec.width, on.positions, rope)
    weights = projected[:, spec.weight_column : spec.weight_column + spec.heads]
    scores, visible = score_entries(heads, weights, spec.heads, spec.width, ragged, pages)
    chosen = top_k(scores, spec.topk, visible)
    return Selection(chosen.clamp_min(0), visible.clamp_max(spec.topk))


def turn_heads(x: Tensor, column: int, heads: int, width: int, positions: Tensor, rope: RopeTable) -> Tensor:
    """Heads in columns `column ..` of x, each turned to its row's position: fp32 [rows, heads * width]."""
    out = x.new_empty(len(x), heads * width)
    _turn_heads[(len(x), heads)](
        x, x.stride(0), column, positions, rope.cos, rope.sin, out, HEADS=heads, WIDTH=width,
        PAIRS=rope.cos.shape[1], WIDE=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out


def score_entries(
    heads: Tensor, weights: Tensor, count: int, width: int, ragged: Ragged, pages: Pages
) -> tuple[Tensor, Tensor]:
    """Scores fp32 [rows, most entries] of `count` turned heads, and how many entries each row sees, int32 [rows].

    What lies behind those is not written.
    """
    rows, on = len(heads), staged(ragged, heads.device)
    scores = heads.new_empty(rows, triton.cdiv(on.tables.shape[1] * pages.entries, 4) * 4)
    if pages.are_records:
        score_records(heads, weights, count, ragged, pages, scores)
        return scores, (on.positions + 1) // pages.rate
    _score[(rows, triton.cdiv(scores.shape[1], _KEYS))](
        heads, weights, weights.stride(0), on.positions, on.sequences, on.tables, on.tables.stride(0), pages.storage,
        pages.storage.stride(0), pages.offset, scores, scores.stride(0), width**-0.5, count**-0.5, HEADS=count,
        WIDTH=width, ENTRIES=pages.entries, RATE=pages.rate, KEYS=_KEYS,
        BLOCK=max(16, triton.next_power_of_2(count)), WIDE=max(16, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
    return scores, (on.positions + 1) // pages.rate


def store_index_key(projected: Tensor, spec: IndexKeySpec, ragged: Ragged, pages: Pages, rope: RopeTable) -> None:
    """As reference.mla.store_index_key."""
    on, width = staged(ragged, projected.device), spec.norm.shape[0]
    _store_index_key[(len(projected),)](
        projected, projected.stride(0), spec.column, spec.norm, spec.bias, on.positions, on.sequences, on.tables,
        on.tables.stride(0), pages.storage, pages.storage.stride(0), pages.offset, rope.cos, rope.sin, spec.norm_eps,
        ENTRIES=pages.entries, WIDTH=width, PAIRS=rope.cos.shape[1], WIDE=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


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
    heads, weights, stride, positions, sequences, tables, table_stride, storage, page_stride, offset, scores,
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
        share = tl.load(weights + row * stride + head, mask=head < HEADS, other=0.0) * head_scale
        table = tables + tl.load(sequences + row).to(tl.int64) * table_stride
        page = tl.load(table + entry // ENTRIES, mask=inside, other=0).to(tl.int64)
        places = storage + page * page_stride + offset + (entry % ENTRIES) * WIDTH
        keys = tl.load(places[:, None] + channel[None, :], mask=inside[:, None] & wide, other=0.0).to(tl.float32)
        dots = tl.dot(asked, tl.trans(keys), input_precision="tf32x3") * key_scale
        found = tl.sum(tl.maximum(dots, 0.0) * share[:, None], 0)
        tl.store(scores + row * score_stride + entry, found, mask=inside)


@triton.jit
def _store_index_key(
    projected, stride, column, norm, bias, positions, sequences, tables, table_stride, storage, page_stride, offset,
    cosine, sine, eps, ENTRIES: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row's key, layer-normed and turned, to its place."""
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    at = tl.load(positions + row)
    if at >= 0:
        inside = channel < WIDTH
        value = tl.load(projected + row * stride + column + channel, mask=inside, other=0.0)
        value = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
        value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        value *= tl.load(norm + channel, mask=inside, other=0.0)
        value += tl.load(bias + channel, mask=inside, other=0.0)
        value = turned(value, at.to(tl.int64), cosine, sine, channel, 1.0, WIDTH, PAIRS, WIDE)
        page = tl.load(tables + tl.load(sequences + row).to(tl.int64) * table_stride + at // ENTRIES).to(tl.int64)
        target = storage + page * page_stride + offset + (at % ENTRIES) * WIDTH + channel
        tl.store(target, value.to(storage.dtype.element_ty), mask=inside)
