"""Expert choice within groups on a GPU, from a router's logits. One program a row; ties go to the lower expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operands import GroupRouterSpec
from kernels.triton.engine.chained import LAUNCH, chain, follow
from kernels.triton.engine.linear import linear


def route_groups(x: Tensor, spec: GroupRouterSpec) -> tuple[Tensor, Tensor]:
    """As reference.route_groups.route_groups."""
    return choose_in_groups(linear(x, spec.gate), spec)


def choose_in_groups(logits: Tensor, spec: GroupRouterSpec) -> tuple[Tensor, Tensor]:
    """logits fp32 [rows, experts] -> experts int32 [rows, topk + always], weights fp32 [rows, topk + always]."""
    rows, size = len(logits), spec.experts // spec.groups
    chosen = torch.empty(rows, spec.topk + spec.always, dtype=torch.int32, device=logits.device)
    weights = logits.new_empty(rows, spec.topk + spec.always)
    _choose_in_groups[(rows,)](
        logits, logits if spec.bias is None else spec.bias, chosen, weights, spec.scaling, EXPERTS=spec.experts,
        TOPK=spec.topk, ALWAYS=spec.always, GROUPS=spec.groups, KEPT=spec.kept_groups, BEST=spec.group_best,
        SIZE=size, GROUPED=triton.next_power_of_2(spec.groups), SIZED=triton.next_power_of_2(size),
        SLOTS=triton.next_power_of_2(spec.topk + spec.always), BIASED=spec.bias is not None, SIGMOID=spec.sigmoid,
        NORMALIZE=spec.normalize, num_warps=1, **LAUNCH,
    )  # fmt: skip
    return chosen, weights


@triton.jit
def _choose_in_groups(
    logits, bias, chosen, weights, scaling, EXPERTS: tl.constexpr, TOPK: tl.constexpr, ALWAYS: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr, GROUPED: tl.constexpr,
    SIZED: tl.constexpr, SLOTS: tl.constexpr, BIASED: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    follow()
    chain()
    row = tl.program_id(0).to(tl.int64)
    group, member, lane = tl.arange(0, GROUPED), tl.arange(0, SIZED), tl.arange(0, SLOTS)
    expert = group[:, None] * SIZE + member[None, :]
    real = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    value = tl.load(logits + row * EXPERTS + expert, mask=real, other=-float("inf"))
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
