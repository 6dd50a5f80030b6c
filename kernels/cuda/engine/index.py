"""Index keys of V3.2 and V4 as records on Hopper: mixed and cast into their pages, and each row's best by FP8 scores.

Formats: reference/records.py. A row's choice is unique, whatever else is in the batch and by whichever kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda import indexer_top_k as fused
from kernels.cuda import mqa_logits as scoring
from kernels.cuda import top_k as choosing
from kernels.cuda.engine import domain
from kernels.cuda.engine.runs import alike
from kernels.operands import IndexerSpec, IndexKeySpec, IndexMixing, Pages, Ragged, RopeTable, Selection
from kernels.reference.mqa_logits import WIDTH, IndexKeys, MqaOperands
from kernels.reference.records import index_spec
from kernels.staging import staged
from kernels.triton.engine import index as by_triton
from kernels.triton.kv_record import turned_rows
from kernels.triton.scaling import magnitude, scale_of

_ROWS = 16  # keys of one program: the least that tensor cores multiply


def store_index_key(projected: Tensor, spec: IndexKeySpec, ragged: Ragged, pages: Pages, rope: RopeTable) -> None:
    """As reference.mla.store_index_key."""
    if spec.mixing is None or pages.scales is None:
        by_triton.store_index_key(projected, spec, ragged, pages, rope)
        return
    on, rows, scales = staged(ragged, projected.device), len(projected), pages.scales
    _store_keys[(triton.cdiv(rows, _ROWS),)](
        projected, projected.stride(0), spec.column, spec.norm, spec.bias, spec.mixing.matrix, on.positions,
        on.sequences, on.tables, on.tables.stride(0), pages.storage, pages.storage.stride(0), pages.offset,
        scales.storage, scales.storage.stride(0), scales.offset, rope.cos, rope.sin, spec.norm_eps, rows,
        ENTRIES=pages.entries, WIDTH=WIDTH, PAIRS=rope.cos.shape[1], ROWS=_ROWS, **_cast(spec.mixing), num_warps=8,
    )  # fmt: skip


Workspaces: TypeAlias = Callable[[torch.device], fused.Workspace]
"""Memory on a device for launches that follow one another: one engine's."""


def workspaces() -> Workspaces:
    """Of one engine: made where it first launches, then always the same."""
    return functools.cache(lambda device: fused.workspace_of(device))


def store_mixed(keys: Tensor, mixing: IndexMixing, ragged: Ragged, pages: Pages) -> None:
    """Write keys fp32 [windows, 128] as the entries of `ragged.windows[pages.rate]`: reference.storage.store_mixed."""
    on, rows, scales = staged(ragged, keys.device), len(keys), pages.scales
    assert scales is not None  # noqa: S101  narrows the type: keys that are records have them
    sequences, windows = on.windows[pages.rate]
    if rows:
        _store_mixed[(triton.cdiv(rows, _ROWS),)](
            keys, mixing.matrix, windows, sequences, on.tables, on.tables.stride(0), pages.storage,
            pages.storage.stride(0), pages.offset, scales.storage, scales.storage.stride(0), scales.offset, rows,
            ENTRIES=pages.entries, WIDTH=WIDTH, ROWS=_ROWS, **_cast(mixing), num_warps=8,
        )  # fmt: skip


def index_topk(
    queries: Tensor, projected: Tensor, spec: IndexerSpec, mixing: IndexMixing, ragged: Ragged, pages: Pages,
    rope: RopeTable, workspace_on: Workspaces,
) -> Selection:  # fmt: skip
    """As reference.index.index_topk, of keys that are records."""
    on, rows = staged(ragged, queries.device), len(queries)
    asked = torch.empty(rows, spec.heads, WIDTH, dtype=torch.float8_e4m3fn, device=queries.device)
    shares = torch.empty(rows, spec.heads, dtype=torch.float32, device=queries.device)
    weights = projected[:, spec.weight_column :]
    _code_queries[(rows,)](
        queries, queries.stride(0), spec.query_column, weights, weights.stride(0), on.positions, rope.cos, rope.sin,
        mixing.matrix, asked, shares, (spec.heads * spec.width) ** -0.5, HEADS=spec.heads, WIDTH=WIDTH,
        PAIRS=rope.cos.shape[1], **_cast(mixing), num_warps=8,
    )  # fmt: skip
    chosen = torch.empty(rows, spec.topk, dtype=torch.int32, device=queries.device)
    ends, columns = on.positions + 1, on.tables.shape[1] * pages.entries
    if pages.rate > 1:
        ends = ends // pages.rate
    for sequences, run in alike(ragged):
        part, own = slice(run.start, run.stop), slice(sequences.start, sequences.stop)
        given = MqaOperands(asked[part], shares[part], _keys(pages, on.tables[own]), ends[part])
        _choose(given, columns, len(run) // len(sequences), workspace_on, chosen[part])
    return Selection(chosen.clamp_min(0), ends.clamp_max(spec.topk))


def _keys(pages: Pages, tables: Tensor) -> IndexKeys:
    held, scales = pages.storage[:, pages.offset : pages.offset + pages.entries * WIDTH], pages.scales
    assert scales is not None  # noqa: S101  narrows the type: keys that are records have them
    values = held.view(torch.float8_e4m3fn).unflatten(1, (pages.entries, WIDTH))
    return IndexKeys(values, scales.storage[:, scales.offset : scales.offset + scales.entries], tables)


def _choose(given: MqaOperands, columns: int, tokens: int, workspace_on: Workspaces, chosen: Tensor) -> None:
    """The best keys of rows of which each sequence has `tokens`."""
    rows, device = len(chosen), chosen.device
    if not domain.writes_scores(tokens, rows, columns):
        fused.indexer_top_k(given, columns, workspace_on(device), chosen)
        return
    scores = torch.empty(rows, -(-columns // 4) * 4, device=device)[:, :columns]
    scoring.mqa_logits(given, scores)
    choosing.top_k(scores, given.ends, chosen)


def _cast(mixing: IndexMixing) -> dict[str, object]:
    spec = index_spec(mixing)
    return {"SCALE": spec.scale.value, "LARGEST": spec.code.value, "FLOOR": spec.floor}


@triton.jit
def _mixed(value, matrix, WIDTH: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr):
    """Rows of `value` fp32 [rows, WIDTH] times `matrix`, as E4M3 codes and scales fp32 [rows]."""
    lane = tl.arange(0, WIDTH)
    mixing = tl.load(matrix + lane[:, None] * WIDTH + lane[None, :])
    value = tl.dot(value, tl.trans(mixing), input_precision="tf32x3")
    stored, factor = scale_of(tl.max(magnitude(value), 1), SCALE, LARGEST, FLOOR)
    scale = stored
    if SCALE != 0:  # a byte that stands for a power of two
        scale = tl.div_rn(1.0, factor)
    return (value * factor[:, None]).to(tl.float8e4nv), scale


@triton.jit
def _store_keys(
    projected, stride, column, norm, bias, matrix, positions, sequences, tables, table_stride, storage, page_stride,
    offset, scales, scale_stride, scale_offset, cosine, sine, eps, rows, ENTRIES: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """ROWS keys, layer-normed, turned, mixed and cast, to their places."""
    row, channel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = tl.load(positions + row, mask=row < rows, other=-1)
    live = at >= 0
    source = projected + row[:, None] * stride + column + channel[None, :]
    value = tl.load(source, mask=live[:, None], other=0.0)
    value -= (tl.sum(value, 1) / WIDTH)[:, None]
    value *= tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
    value = value * tl.load(norm + channel)[None, :] + tl.load(bias + channel)[None, :]
    value = turned_rows(value, positions, cosine, sine, row, live, ROWS, WIDTH, PAIRS)
    code, scale = _mixed(value, matrix, WIDTH, SCALE, LARGEST, FLOOR)
    sequence = tl.load(sequences + row, mask=live, other=0)
    _place(
        code, scale, at, sequence, live, tables, table_stride, storage, page_stride, offset, scales, scale_stride,
        scale_offset, ENTRIES, WIDTH,
    )  # fmt: skip


@triton.jit
def _store_mixed(
    keys, matrix, windows, sequences, tables, table_stride, storage, page_stride, offset, scales, scale_stride,
    scale_offset, rows, ENTRIES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SCALE: tl.constexpr,
    LARGEST: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """ROWS keys as they are, mixed and cast, to their places."""
    row, channel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    sequence = tl.load(sequences + row, mask=row < rows, other=-1)
    live = sequence >= 0
    at = tl.load(windows + row, mask=live, other=0)
    value = tl.load(keys + row[:, None] * WIDTH + channel[None, :], mask=live[:, None], other=0.0)
    code, scale = _mixed(value, matrix, WIDTH, SCALE, LARGEST, FLOOR)
    _place(
        code, scale, at, sequence, live, tables, table_stride, storage, page_stride, offset, scales, scale_stride,
        scale_offset, ENTRIES, WIDTH,
    )  # fmt: skip


@triton.jit
def _place(
    code, scale, at, sequence, live, tables, table_stride, storage, page_stride, offset, scales, scale_stride,
    scale_offset, ENTRIES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes [rows, WIDTH] and scales of the entries `at` of their sequences."""
    table = tables + sequence.to(tl.int64) * table_stride
    page = tl.load(table + at // ENTRIES, mask=live, other=0).to(tl.int64)
    target = storage + page * page_stride + offset + (at % ENTRIES) * WIDTH
    tl.store(
        target[:, None] + tl.arange(0, WIDTH)[None, :], code.to(tl.uint8, bitcast=True), mask=live[:, None]
    )  # fmt: skip
    tl.store(scales + page * scale_stride + scale_offset + at % ENTRIES, scale, mask=live)


@triton.jit
def _code_queries(
    queries, stride, column, weights, weight_stride, positions, cosine, sine, matrix, codes, shares, factor,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    """One row's heads, turned, mixed and cast; what scales them goes into their shares."""
    row, head, channel = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS), tl.arange(0, WIDTH)
    value = tl.load(queries + row * stride + column + head[:, None] * WIDTH + channel[None, :])
    same = row + tl.zeros((HEADS,), tl.int64)
    live = (head >= 0) & (tl.load(positions + row) >= 0)
    value = turned_rows(value, positions, cosine, sine, same, live, HEADS, WIDTH, PAIRS)
    code, scale = _mixed(value, matrix, WIDTH, SCALE, LARGEST, FLOOR)
    tl.store(codes + (row * HEADS + head[:, None]) * WIDTH + channel[None, :], code)
    share = tl.load(weights + row * weight_stride + head)
    tl.store(shares + row * HEADS + head, share * factor * scale)
