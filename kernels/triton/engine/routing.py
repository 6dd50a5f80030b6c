"""Expert choice within groups on a GPU, from a router's logits. One program a row; ties go to the lower expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import GroupRouterSpec
from kernels.triton.engine.chained import LAUNCH, chain, follow
from kernels.triton.engine.linear import linear

_CONSTANTS = (
    "EXPERTS", "TOPK", "ALWAYS", "GROUPS", "KEPT", "BEST", "SIZE", "GROUPED", "SIZED", "CHOICES", "BIASED", "SIGMOID",
    "NORMALIZE",
)  # fmt: skip


def route_groups(x: Tensor, spec: GroupRouterSpec) -> tuple[Tensor, Tensor]:
    """As reference.route_groups.route_groups."""
    return choose_in_groups(linear(x, spec.gate), spec)


def choose_in_groups(logits: Tensor, spec: GroupRouterSpec) -> tuple[Tensor, Tensor]:
    """logits fp32 [rows, experts] -> experts int32 [rows, topk + always], weights fp32 [rows, topk + always]."""
    rows = len(logits)
    chosen = torch.empty(rows, spec.topk + spec.always, dtype=torch.int32, device=logits.device)
    weights = logits.new_empty(rows, spec.topk + spec.always)
    _choose_in_groups[(rows,)](
        logits, logits if spec.bias is None else spec.bias, chosen, weights, spec.scaling, **choice_of(spec),
        num_warps=1, **LAUNCH,
    )  # fmt: skip
    return chosen, weights


def choice_of(spec: GroupRouterSpec | None) -> dict[str, object]:
    """The constants of `choose_row`; of no router where there is none."""
    if spec is None:
        return dict.fromkeys(_CONSTANTS, 1)
    size = spec.experts // spec.groups
    values = (
        spec.experts, spec.topk, spec.always, spec.groups, spec.kept_groups, spec.group_best, size,
        triton.next_power_of_2(spec.groups), triton.next_power_of_2(size),
        triton.next_power_of_2(spec.topk + spec.always), spec.bias is not None, spec.sigmoid, spec.normalize,
    )  # fmt: skip
    return dict(zip(_CONSTANTS, values, strict=True))


@triton.jit
def _choose_in_groups(
    logits, bias, chosen, weights, scaling, EXPERTS: tl.constexpr, TOPK: tl.constexpr, ALWAYS: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr, GROUPED: tl.constexpr,
    SIZED: tl.constexpr, CHOICES: tl.constexpr, BIASED: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    follow()
    chain()
    choose_row(
        logits, bias, chosen, weights, tl.program_id(0).to(tl.int64), scaling, EXPERTS, TOPK, ALWAYS, GROUPS, KEPT,
        BEST, SIZE, GROUPED, SIZED, CHOICES, BIASED, SIGMOID, NORMALIZE,
    )  # fmt: skip


@triton.jit
def choose_row(
    logits, bias, chosen, weights, row, scaling, EXPERTS: tl.constexpr, TOPK: tl.constexpr, ALWAYS: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr, GROUPED: tl.constexpr,
    SIZED: tl.constexpr, CHOICES: tl.constexpr, BIASED: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The experts of one row and their weights, by one program. Logits may have come from this launch."""
    group, member, lane = tl.arange(0, GROUPED), tl.arange(0, SIZED), tl.arange(0, CHOICES)
    expert = group[:, None] * SIZE + member[None, :]
    real = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    value = tl.load(logits + row * EXPERTS + expert, mask=real, other=-float("inf"), cache_modifier=".cg")
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-value))
    else:
        scores = tl.exp(value - tl.max(tl.max(value, 1), 0))
        scores /= tl.sum(tl.sum(scores, 1), 0)
    left = scores
    if BIASED:
        left += tl.load(bias + expert, mask=real, other=0.0)
    left = tl.where(real, left, -float("inf"))
    if KEPT < GROUPS:
        ranked, rest = tl.zeros((GROUPED,), tl.float32), left
        for _ in tl.static_range(BEST):
            best, place = tl.max(rest, 1, return_indices=True)
            ranked += best
            rest = tl.where(member[None, :] == place[:, None], -float("inf"), rest)
        ahead = (ranked[None, :] > ranked[:, None]) | (
            (ranked[None, :] == ranked[:, None]) & (group[None, :] < group[:, None])
        )
        kept = tl.sum(ahead.to(tl.int32), 1) < KEPT
        left = tl.where(kept[:, None], left, -float("inf"))
    found, share = EXPERTS + lane - TOPK, tl.where(lane < TOPK, 0.0, 1.0)
    flat, names, unbiased = (
        tl.reshape(left, (GROUPED * SIZED,)),
        tl.arange(0, GROUPED * SIZED),
        tl.reshape(scores, (GROUPED * SIZED,)),
    )
    for slot in tl.static_range(TOPK):
        best = tl.argmax(flat, 0)
        found = tl.where(lane == slot, best // SIZED * SIZE + best % SIZED, found)
        share = tl.where(lane == slot, tl.sum(tl.where(names == best, unbiased, 0.0), 0), share)
        flat = tl.where(names == best, -float("inf"), flat)
    if NORMALIZE:
        share = tl.where(lane < TOPK, share / (tl.sum(tl.where(lane < TOPK, share, 0.0), 0) + 1e-20), share)
    share = tl.where(lane < TOPK, share * scaling, share)
    inside = lane < TOPK + ALWAYS
    tl.store(chosen + row * (TOPK + ALWAYS) + lane, found, mask=inside)
    tl.store(weights + row * (TOPK + ALWAYS) + lane, share, mask=inside)
