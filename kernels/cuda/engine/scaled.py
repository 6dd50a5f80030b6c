"""Products of weights kept as they are published, on Hopper. Definition: reference/scaled.py.

Experts' rows go to places in memory: with few rows every expert has room for all of them, with many one expert's rows
follow another's. Nothing is counted on the host.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda import gemm as kernel
from kernels.cuda.gemm_choice import choose_cut
from kernels.cuda.gemm_pack import PackedFp4, pack_fp4
from kernels.dispatch import Plan, make_plan
from kernels.operands import ExpertBank
from kernels.reference.gemm import DEPTH, Activations, Fp4Weights, Fp8Weights, padded_tokens
from kernels.reference.scaled import CAST, Scaled, ScaledExperts
from kernels.triton.cast import cast_rows
from kernels.triton.dispatch import plan as make_places
from kernels.triton.engine.chained import LAUNCH, chain, follow
from kernels.triton.scaling import magnitude, scale_of
from kernels.triton.swiglu import swiglu_cast

_FEW_ROWS = 128  # up to as many, every expert has room for all rows
_RUN = 128  # rows: where the next expert's may begin
_AT_ONCE = 8  # scales that one program makes


def keep(weights: Fp8Weights | Fp4Weights, order: Tensor | None = None) -> Scaled:
    """The weights as the kernels read them. Raises KernelError for FP4 whose scales are too far apart."""
    return Scaled(pack_fp4(weights) if isinstance(weights, Fp4Weights) else weights, order)


def linear(x: Tensor, weight: Scaled) -> Tensor:
    """As reference.scaled.linear."""
    groups, _, channels = _shape(weight)
    rows = len(x)
    activations = _room(groups, rows, channels, x.device)
    for group in range(groups):
        part = x[:, group * channels : (group + 1) * channels]
        cast_rows(part, CAST, activations.codes[group], activations.scales[group, :, :rows].T)
    return _multiplied(activations, weight, rows)


def takes_norms(weight: Scaled) -> bool:
    """Whether `norm_linear` multiplies with these weights: of one matrix, not of several that share a row."""
    return _shape(weight)[0] == 1


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Scaled) -> Tensor:
    """`linear` of the norm of x [rows, channels], whose rows may stand apart: normed and cast in one launch."""
    (rows, channels), groups = x.shape, triton.next_power_of_2(x.shape[1] // DEPTH)
    activations = _room(1, rows, channels, x.device)
    _cast_norms[(rows,)](
        x, x.stride(0), norm, activations.codes, activations.scales, activations.scales.stride(1), eps, WIDTH=channels,
        GROUPS=groups, FLOOR=CAST.floor, num_warps=4 if groups <= 32 else 8, **LAUNCH,
    )  # fmt: skip
    return _multiplied(activations, weight, rows)


def _multiplied(activations: Activations, weight: Scaled, rows: int) -> Tensor:
    """fp32 [rows, groups * outputs], every output where it belongs."""
    groups, outputs, _ = _shape(weight)
    found = _product(activations, weight, None, None, rows)
    product = found[0] if groups == 1 else found.transpose(0, 1).reshape(rows, groups * outputs)
    return (product if weight.order is None else product[:, weight.order]).to(torch.float32)


def experts(x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank, residual: Tensor | None = None) -> Tensor:
    """As reference.scaled.experts, plus `residual` where it is given."""
    kept: ScaledExperts = bank.gate
    limit = bank.limit if math.isfinite(bank.limit) else None
    shared = _shared(x, kept.shared, limit)
    if kept.routed is None:
        return shared.to(torch.float32) if residual is None else residual + shared
    parts, places = _routed(x, chosen, kept.routed, limit)
    (rows, hidden), slots = x.shape, chosen.shape[1]
    out, wide = x.new_empty(rows, hidden), min(triton.next_power_of_2(hidden), 1024)
    _sum_places[(rows, triton.cdiv(hidden, wide))](
        parts, places, weights, shared, out if residual is None else residual, out, hidden, SLOTS=slots, WIDE=wide,
        ADD=residual is not None, num_warps=4,
    )  # fmt: skip
    return out


def _shared(x: Tensor, pair: tuple[Scaled, Scaled], limit: float | None) -> Tensor:
    """The expert that all rows take: bf16 [rows, hidden]."""
    (rows, hidden), (_, _, width) = x.shape, _shape(pair[1])
    given, inner = _room(1, rows, hidden, x.device), _room(1, rows, width, x.device)
    cast_rows(x, CAST, given.codes[0], given.scales[0, :, :rows].T)
    middle = _product(given, pair[0], None, None, rows)[0]
    swiglu_cast(middle, limit, None, CAST, inner.codes[0], inner.scales[0, :, :rows].T)
    return _product(inner, pair[1], None, None, rows)[0]


def _routed(x: Tensor, chosen: Tensor, pair: tuple[Scaled, Scaled], limit: float | None) -> tuple[Tensor, Tensor]:
    """What each chosen expert makes of a row, bf16 [places, hidden], and the places of rows' slots."""
    (rows, hidden), slots, (count, _, width) = x.shape, chosen.shape[1], _shape(pair[1])
    room = rows if rows <= _FEW_ROWS else 0
    plan = make_plan(rows, slots, count, count * room or rows * slots + count * (_RUN - 1), x.device)
    make_places(chosen, room, _RUN, plan)
    groups, capacity = (count, room) if room else (1, len(plan.sources))
    counts, named = (plan.counts, None) if room else (None, _named(chosen, plan))
    given, inner = _room(groups, capacity, hidden, x.device), _room(groups, capacity, width, x.device)
    many, average = _many(hidden), max(1, rows * slots // count)
    _cast_to_places[(rows, hidden // (many * DEPTH))](
        x, x.stride(0), plan.places, given.codes, given.scales, capacity, given.scales.shape[2], WIDTH=hidden,
        SLOTS=slots, GROUPS=many, FLOOR=CAST.floor, num_warps=4,
    )  # fmt: skip
    middle, many = _product(given, pair[0], counts, named, average), _many(width)
    _gate_to_places[(rows * slots, width // (many * DEPTH))](
        middle, plan.places, inner.codes, inner.scales, limit or 0.0, capacity, inner.scales.shape[2], WIDTH=width,
        GROUPS=many, LIMITED=limit is not None, FLOOR=CAST.floor, num_warps=4,
    )  # fmt: skip
    return _product(inner, pair[1], counts, named, average).flatten(0, 1), plan.places


def _shape(weight: Scaled) -> tuple[int, int, int]:
    """Groups, outputs and channels."""
    kept = weight.weights
    if isinstance(kept, PackedFp4):
        return len(kept.chunks), kept.rows, kept.channels
    groups, outputs, channels = kept.codes.shape
    return groups, outputs, channels


def _room(groups: int, capacity: int, channels: int, device: torch.device) -> Activations:
    codes = torch.empty(groups, capacity, channels, dtype=torch.float8_e4m3fn, device=device)
    return Activations(codes, torch.empty(groups, channels // DEPTH, padded_tokens(capacity), device=device))


def _product(
    activations: Activations, weight: Scaled, counts: Tensor | None, named: Tensor | None, tokens: int
) -> Tensor:
    """bf16 [groups, capacity, outputs]; `tokens`: of a group on average."""
    (groups, capacity, channels), (weight_groups, outputs, _) = activations.codes.shape, _shape(weight)
    kept = weight.weights
    is_fp4, masked = isinstance(kept, PackedFp4), counts is not None
    cut = choose_cut(outputs, channels, weight_groups, tokens, is_fp4, kept.grain, masked)
    out = torch.empty(groups, capacity, outputs, dtype=torch.bfloat16, device=activations.codes.device)
    kernel.gemm(activations, kept, counts, named, out, cut)
    return out


def _named(chosen: Tensor, plan: Plan) -> Tensor:
    """The expert of every place, -1 where there is none: int32 [places]."""
    return torch.where(plan.sources >= 0, chosen.view(-1)[plan.sources.clamp_min(0)], -1)


def _many(channels: int) -> int:
    """Scales that one program makes of a row of so many channels."""
    blocks = channels // DEPTH
    return min(blocks & -blocks, _AT_ONCE)


@triton.jit
def _narrowed(value, FLOOR: tl.constexpr):
    """Codes and scales of fp32 [groups, 128], as reference/cast.py has them."""
    scale, factor = scale_of(tl.max(magnitude(value), 1), 0, 448.0, FLOOR)
    return (value * factor[:, None]).to(tl.float8e4nv), scale


@triton.jit
def _cast_norms(
    x, stride, norm, codes, scales, padded, eps, WIDTH: tl.constexpr, GROUPS: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """One row, normed and cast."""
    row, group, lane = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS), tl.arange(0, 128)
    at = group[:, None] * 128 + lane[None, :]
    follow()
    share = tl.load(norm + at, mask=at < WIDTH, other=0.0)
    chain()
    value = tl.load(x + row * stride + at, mask=at < WIDTH, other=0.0)
    value *= tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / WIDTH + eps)
    code, scale = _narrowed(value * share, FLOOR)
    tl.store(codes + row * WIDTH + at, code, mask=at < WIDTH)
    tl.store(scales + group.to(tl.int64) * padded + row, scale, mask=group < WIDTH // 128)


@triton.jit
def _put(
    codes, scales, place, capacity, padded, group, lane, code, scale, WIDTH: tl.constexpr
):  # fmt: skip
    """Codes and scales of one row, from `group` on, to a place."""
    tl.store(codes + place * WIDTH + group[:, None] * 128 + lane[None, :], code)
    target = scales + (place // capacity) * (WIDTH // 128) * padded + place % capacity
    tl.store(target + group.to(tl.int64) * padded, scale)


@triton.jit
def _cast_to_places(
    x, stride, places, codes, scales, capacity, padded, WIDTH: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    FLOOR: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 128)
    value = tl.load(x + row * stride + group[:, None] * 128 + lane[None, :]).to(tl.float32)
    code, scale = _narrowed(value, FLOOR)
    for slot in tl.static_range(SLOTS):
        place = tl.load(places + row * SLOTS + slot).to(tl.int64)
        _put(codes, scales, place, capacity, padded, group, lane, code, scale, WIDTH)


@triton.jit
def _gate_to_places(
    middle, places, codes, scales, limit, capacity, padded, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    LIMITED: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of one place, cast."""
    place = tl.load(places + tl.program_id(0)).to(tl.int64)
    group, lane = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, 128)
    source = middle + place * (2 * WIDTH) + group[:, None] * 128 + lane[None, :]
    opened, raised = tl.load(source).to(tl.float32), tl.load(source + WIDTH).to(tl.float32)
    if LIMITED:
        opened, raised = tl.minimum(opened, limit), tl.minimum(tl.maximum(raised, -limit), limit)
    code, scale = _narrowed(opened / (1 + tl.exp(-opened)) * raised, FLOOR)
    _put(codes, scales, place, capacity, padded, group, lane, code, scale, WIDTH)


@triton.jit
def _sum_places(
    parts, places, weights, shared, residual, out, hidden, SLOTS: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """The weighted parts of one row, and the one that all rows take."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total = tl.load(shared + row * hidden + at, mask=at < hidden, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + row * hidden + at, mask=at < hidden, other=0.0)
    for slot in tl.static_range(SLOTS):
        place = tl.load(places + row * SLOTS + slot).to(tl.int64)
        weight = tl.load(weights + row * SLOTS + slot)
        total += tl.load(parts + place * hidden + at, mask=at < hidden, other=0.0).to(tl.float32) * weight
    tl.store(out + row * hidden + at, total, mask=at < hidden)
