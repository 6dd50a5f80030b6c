"""Matrix products on a GPU: a product for few rows that reads each weight once, the device's library for many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.linear import Dense
from kernels.reference.linear import linear as linear_by_library
from kernels.triton.engine.chained import LAUNCH, chain, follow
from kernels.triton.engine.precise import precise, takes

FEW_ROWS = 2  # up to as many the product is bound by reading the weights, and tensor cores have nothing to do
NARROW = 2048  # channels; of wider rows a second one costs more than tensor cores do (docs/benchmarks.md)
_TILE = 16_384  # bytes of weights that one program holds at a time


def is_few(rows: int, channels: int) -> bool:
    """Whether rows of so many channels are multiplied one by one."""
    return rows <= (FEW_ROWS if channels <= NARROW else 1)


def read_as(weight: Dense, rows: int) -> torch.dtype:
    """The type that a product of so many rows reads: one that is given it rounds nothing any more."""
    return torch.bfloat16 if weight.rounds and not is_few(rows, weight.matrix.shape[2]) else torch.float32


def linear(x: Tensor, weight: Dense, kind: torch.dtype = torch.float32) -> Tensor:
    """As reference.linear.linear; rows of x may stand apart. `kind`: what `read_as` says of who reads the product."""
    rows, (groups, columns, inner) = x.shape[0], weight.matrix.shape
    if is_few(rows, inner):
        return few_rows(x, weight)
    if not weight.rounds:
        return precise(x, weight) if takes(weight) else linear_by_library(x, weight)
    parts, out = x.to(torch.bfloat16).view(rows, groups, inner), x.new_empty(rows, groups * columns, dtype=kind)
    more = {} if kind == torch.bfloat16 else {"out_dtype": kind}
    if groups == 1:
        return torch.mm(parts[:, 0], weight.matrix[0].T, **more, out=out)
    matrices = weight.matrix.transpose(1, 2)
    torch.bmm(parts.transpose(0, 1), matrices, **more, out=out.view(rows, groups, columns).transpose(0, 1))
    return out


def few_rows(
    x: Tensor, weight: Dense, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None,
    unit: bool = False,
) -> Tensor:  # fmt: skip
    """The product of x [rows, >= groups * in], whose first columns count: normed first with `norm`, or with ones if
    `unit`, and added to `residual` [rows, groups * out] where it is given. fp32 [rows, groups * out]. Of x [rows,
    parts, groups * in] the product of the parts' sum, which is not normed."""
    (groups, columns, inner), parts = weight.matrix.shape, x.shape[1] if x.dim() == 3 else 1
    out = x.new_empty(x.shape[0], groups * columns)
    tile = min(triton.next_power_of_2(inner), 2048)
    lines = max(1, min(_TILE // tile // weight.matrix.itemsize, triton.next_power_of_2(columns)))
    _few_rows[(triton.cdiv(columns, lines), groups, x.shape[0])](
        x, weight.matrix, x if norm is None else norm, x if residual is None else residual, out, x.stride(0), columns,
        inner, eps, LINES=lines, TILE=tile, TURNS=triton.cdiv(inner, tile), NORM=norm is not None or unit,
        WEIGHTED=norm is not None, ADD=residual is not None, ROUNDS=weight.rounds, PARTS=parts, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return out


@triton.jit
def rounded(x, ROUNDS: tl.constexpr):
    """x as a product sees it: bf16 values where the compute type is bf16."""
    if ROUNDS:
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def _few_rows(
    x, matrix, norm, residual, out, stride, columns, inner, eps, LINES: tl.constexpr, TILE: tl.constexpr,
    TURNS: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr, ADD: tl.constexpr, ROUNDS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """LINES outputs of one group and one row. Weights are asked for before what they are multiplied with."""
    first, group, row = tl.program_id(0) * LINES, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    line = first + tl.arange(0, LINES)
    at = tl.arange(0, TILE)
    source = x + row * stride + group * inner
    weights = matrix + group * columns * inner + line[:, None].to(tl.int64) * inner
    follow()
    ahead = tl.load(weights + at[None, :], mask=(line < columns)[:, None] & (at < inner)[None, :], other=0.0)
    chain()
    target = row * tl.num_programs(1) * columns + group * columns + line
    before = tl.zeros((LINES,), tl.float32)
    if ADD:
        before = tl.load(residual + target, mask=line < columns, other=0.0)
    scale = 1.0
    if NORM:
        squares = tl.zeros((TILE,), tl.float32)
        for turn in tl.static_range(TURNS):
            value = tl.load(source + turn * TILE + at, mask=turn * TILE + at < inner, other=0.0)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, 0) / inner + eps)
    total = tl.zeros((LINES, TILE), tl.float32)
    for turn in tl.static_range(TURNS):
        place = turn * TILE + at
        inside = place < inner
        weight = ahead
        if turn > 0:
            weight = tl.load(weights + place[None, :], mask=(line < columns)[:, None] & inside[None, :], other=0.0)
        value = tl.load(source + place, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            value += tl.load(source + part * (stride // PARTS) + place, mask=inside, other=0.0)
        value *= scale
        if WEIGHTED:
            value *= tl.load(norm + place, mask=inside, other=0.0)
        total += weight.to(tl.float32) * rounded(value, ROUNDS)[None, :]
    tl.store(out + target, tl.sum(total, 1) + before, mask=line < columns)
