"""Routed rows, friendly and hostile, and the checks of dispatch's kernels and of whole rounds. Knows no clock.

`TRITON_INTERPRET=1 python -m kernels.testing.dispatch` runs the kernels without a GPU, in triton's interpreter.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

from kernels.dispatch import Dispatcher, DispatchOps, Exchange, Group, Plan, make_plan
from kernels.reference import dispatch as definition
from kernels.reference.cast import CastSpec, Code, Scale
from kernels.testing.tile import hold, near


def make_chosen(rows: int, choices: int, groups: int, device: torch.device, seed: int, hostile: bool) -> Tensor:
    """int32 [rows, choices], no group twice in a row. Hostile: few groups, rows without any, and gaps."""
    draw = torch.Generator(device).manual_seed(seed)
    wish = torch.rand(rows, groups, generator=draw, device=device)
    if hostile:
        wish[:, : choices + 1] += 1  # all go to the first few
    chosen = wish.topk(choices, 1).indices.to(torch.int32)
    if hostile:
        chosen[torch.rand(rows, choices, generator=draw, device=device) < 0.2] = -1
        chosen[rows // 2] = -1
    return chosen.contiguous()


def check_plans(ops: DispatchOps, device: torch.device, rows: int, choices: int, groups: int) -> None:
    """Plans equal their definition: contiguous at several alignments and in equal rooms."""
    for hostile in (False, True):
        chosen = make_chosen(rows, choices, groups, device, rows, hostile)
        for capacity, alignment in ((0, 1), (0, 128), (rows + 3, 0)):
            slots = groups * capacity if capacity else rows * choices + groups * max(0, alignment - 1)
            found, expected = (_poisoned(make_plan(rows, choices, groups, slots + 5, device)) for _ in range(2))
            ops.plan(chosen, capacity, alignment, found)
            definition.plan(chosen, capacity, alignment, expected)
            for name in ("counts", "offsets", "places", "sources"):
                one, other = getattr(found, name), getattr(expected, name)
                hold(torch.equal(one, other), f"{name} of a plan, capacity {capacity}, alignment {alignment}")
        targets = [torch.full_like(chosen, -7) for _ in range(2)]
        for each, run in zip(targets, (ops.destinations, definition.destinations), strict=True):
            run(chosen, max(1, groups // 4), each)
        hold(torch.equal(*targets), "destinations")


def check_permutation(
    ops: DispatchOps, device: torch.device, rows: int, choices: int, groups: int, hidden: int
) -> None:
    """Rows copied to their slots and summed back; slots without a row are neither written nor read."""
    draw = torch.Generator(device).manual_seed(hidden)
    chosen = make_chosen(rows, choices, groups, device, rows, True)
    plan = make_plan(rows, choices, groups, rows * choices + groups * 15, device)
    ops.plan(chosen, 0, 16, plan)
    x = torch.randn(rows, hidden, generator=draw, device=device).to(torch.bfloat16)
    for given in (x, x.to(torch.float8_e4m3fn), torch.rand(rows, hidden // 64, generator=draw, device=device)):
        found = torch.full((len(plan.sources), given.shape[1]), 7, device=device).to(given.dtype)
        expected = found.clone()
        ops.copy_rows(given, plan.sources, choices, found)
        there = plan.sources >= 0
        expected[there] = given[(plan.sources[there] // choices).long()]
        hold(torch.equal(found.float(), expected.float()), f"copied rows of {given.dtype}")
    y = torch.full((len(plan.sources), hidden), torch.nan, dtype=torch.bfloat16, device=device)
    ops.copy_rows(x, plan.sources, choices, y)
    weights = torch.rand(rows, choices, generator=draw, device=device)
    added = torch.randn(rows, hidden, generator=draw, device=device).to(torch.bfloat16)
    for one, other in ((weights, added), (None, None), (weights, None)):
        out = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16, device=device)
        ops.combine(y, plan.places, one, other, out)
        factor = ((chosen >= 0) * (1.0 if one is None else one.double())).sum(1, keepdim=True)
        near(out, x.double() * factor + (0 if other is None else other.double()), "combined rows")


def check_round(ops: DispatchOps, exchange: Exchange, device: torch.device, rows: int, hidden: int) -> None:
    """Rounds over all ranks: expert e makes (e + 1) * x. Rows and weights are this rank's own; AssertionError where
    what comes back is not x + sum_k weight_k * (expert_k + 1) * x."""
    spec, choices, experts = CastSpec(Code.E4M3, 128, Scale.FP32), 3, 8
    parts = ((torch.bfloat16, hidden), (torch.float32, hidden // spec.group))
    dispatcher = Dispatcher(ops, exchange, experts, choices, rows + 2, parts, hidden, device)
    for turn in range(2):
        draw = torch.Generator(device).manual_seed(17 * exchange.rank + turn)
        x = torch.randn(rows, hidden, generator=draw, device=device).to(torch.bfloat16)
        scales = torch.rand(rows, hidden // spec.group, generator=draw, device=device)
        chosen = make_chosen(rows, choices, experts, device, exchange.rank + 5 * turn, bool(turn))
        weights = torch.rand(rows, choices, generator=draw, device=device)
        received = dispatcher.dispatch((x, scales), chosen, weights)
        summed = _experts(ops, received.parts[0], received.experts, received.weights, exchange, experts)
        out = torch.full((rows, hidden), torch.nan, dtype=torch.bfloat16, device=device)
        dispatcher.combine(summed, rows, x, out)
        factor = ((chosen + 1) * weights.double()).masked_fill(chosen < 0, 0).sum(1, keepdim=True)
        off = (out.double() - x.double() * (1 + factor)).abs()
        hold(bool((off <= 0.02 * x.double().abs() * (1 + factor) + 1e-6).all()), f"a round, turn {turn}")
        _same_scales(received.parts[1], received.experts, exchange)


def run_rank(rank: int, size: int, folder: Path, rows: int) -> None:
    """One of `size` processes that meet in an empty folder and take the reference's rounds over gloo, on the CPU."""
    place = f"file://{folder / 'ranks'}"
    torch.distributed.init_process_group(
        "gloo", init_method=place, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        check_round(definition.OPS, Group(), torch.device("cpu"), rows, 128)
    finally:
        torch.distributed.destroy_process_group()


def _experts(ops: DispatchOps, x: Tensor, experts: Tensor, weights: Tensor, exchange: Exchange, count: int) -> Tensor:
    """What this rank's experts make of received rows, weighted and summed."""
    rows, choices = experts.shape
    local = count // exchange.size
    plan = make_plan(rows, choices, local, rows * choices + local * 7, x.device)
    ops.plan(experts, 0, 8, plan)
    slots = torch.zeros(len(plan.sources), x.shape[1], dtype=torch.bfloat16, device=x.device)
    ops.copy_rows(x, plan.sources, choices, slots)
    offsets = plan.offsets.tolist()
    for expert, (first, end) in enumerate(pairwise(offsets)):
        slots[first:end] *= exchange.rank * local + expert + 1
    summed = torch.full((rows, x.shape[1]), torch.nan, dtype=torch.bfloat16, device=x.device)
    ops.combine(slots, plan.places, weights, None, summed)
    return summed


def _same_scales(scales: Tensor, experts: Tensor, exchange: Exchange) -> None:
    """Every row that has an expert here has its second part too."""
    there = (experts >= 0).any(1)
    hold(bool((scales[there] > 0).any(1).all()), f"scales at rank {exchange.rank}")


def _poisoned(plan: Plan) -> Plan:
    for each in (plan.counts, plan.offsets, plan.places, plan.sources, plan.blocks):
        each.fill_(0x5A5A5A5A)
    return plan


if __name__ == "__main__":
    from kernels.dispatch import Alone
    from kernels.testing.interpreter import require_interpreter

    require_interpreter()
    from kernels.triton.dispatch import OPS

    cpu = torch.device("cpu")
    check_plans(OPS, cpu, 101, 3, 12)
    check_permutation(OPS, cpu, 9, 3, 5, 128)
    check_round(OPS, Alone(), cpu, 7, 128)
    print("the kernels equal the reference")
