"""The lightning indexer on a GPU: scores of every visible key, and the best of them exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import IndexerSpec, IndexKeySpec, Pages, Ragged, RopeTable, Selection
from kernels.reference.kv_record import Packed
from kernels.reference.top_k import top_k
from kernels.staging import staged
from kernels.triton.engine.rows import turned
from kernels.triton.scaling import E8M0, e2m1, e2m1_values, magnitude, scale_of

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
    _score[(rows, triton.cdiv(scores.shape[1], _KEYS))](
        heads, weights, weights.stride(0), on.positions, on.sequences, on.tables, on.tables.stride(0), pages.storage,
        pages.storage.stride(0), pages.offset, scores, scores.stride(0), width**-0.5, count**-0.5, HEADS=count,
        WIDTH=width, ENTRIES=pages.entries, RATE=pages.rate, KEYS=_KEYS, RECORD=pages.width if pages.are_records else 0,
        FLOOR=Packed.V41_INDEX.value.spec.floor,
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
    RATE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, RECORD: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    """Scores of KEYS entries for one row; those it cannot see are left as they are. RECORD: bytes of a key of WIDTH
    E2M1 codes and a scale for 32 of them, to which queries are rounded as well; 0: keys are numbers."""
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
        places = storage + page * page_stride + offset + (entry % ENTRIES) * (RECORD if RECORD > 0 else WIDTH)
        seen = inside[:, None] & wide
        if RECORD > 0:
            code = tl.load(places[:, None] + (channel // 2)[None, :], mask=seen, other=0).to(tl.int32)
            stored = tl.load(places[:, None] + (WIDTH // 2 + channel // 32)[None, :], mask=seen, other=0).to(tl.int32)
            code = (code >> (channel % 2 * 4)[None, :]) & 15
            keys = e2m1_values(code) * (stored << 23).to(tl.float32, bitcast=True)
            groups = tl.reshape(asked, (BLOCK, WIDE // 32, 32))
            _, factor = scale_of(tl.max(magnitude(groups), 2), E8M0, 6.0, FLOOR)
            factor = tl.expand_dims(factor, 2)
            asked = tl.reshape(e2m1_values(e2m1(groups * factor)) * tl.div_rn(1.0, factor), (BLOCK, WIDE))
            dots = tl.dot(asked, tl.trans(keys), input_precision="tf32") * key_scale  # which holds either exactly
        else:
            keys = tl.load(places[:, None] + channel[None, :], mask=seen, other=0.0).to(tl.float32)
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
