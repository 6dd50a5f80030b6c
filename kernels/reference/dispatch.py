"""Layouts of dispatch and combine, permutation and weighted reduction in torch.

A plan sorts entries (row, choice) by their group, stably: slots of group g begin at g * capacity, or, where capacity is
0, one group behind another at multiples of `alignment`. Grouped products take both: masked (counts) and contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import PLAN_BLOCK, DispatchOps, Plan
from kernels.errors import KernelError
from kernels.reference.rms_norm import check_rows


def plan(chosen: Tensor, capacity: int, alignment: int, into: Plan) -> None:
    """Fill a plan of chosen int32 [rows, choices], a group or -1. Raises KernelError for a plan that does not fit."""
    check_plan(chosen, capacity, alignment, into)
    groups = len(into.counts)
    flat = chosen.flatten().long()
    kept = flat >= 0
    into.counts.copy_(torch.bincount(flat[kept], minlength=groups))
    if capacity:
        sizes = torch.full_like(into.counts, capacity)
    else:
        sizes = (into.counts + alignment - 1) // alignment * alignment
    into.offsets[0] = 0
    into.offsets[1:] = sizes.cumsum(0)
    order = torch.where(kept, flat, groups).argsort(stable=True)[: int(kept.sum())]
    within = torch.arange(len(order), device=flat.device) - (into.counts.cumsum(0) - into.counts)[flat[order]]
    slots = (into.offsets[:-1][flat[order]] + within).to(torch.int32)
    into.sources.fill_(-1)
    into.sources[slots.long()] = order.to(torch.int32)
    places = torch.full_like(into.places.flatten(), -1)
    places[order] = slots
    into.places.copy_(places.view_as(into.places))


def destinations(chosen: Tensor, local: int, targets: Tensor) -> None:
    """targets int32 [rows, choices]: the rank of a chosen expert, `local` of which are on each; -1 where the row goes
    there already, or nothing is chosen."""
    check_rows("chosen", chosen, tuple(chosen.shape), torch.int32)
    ranks = torch.where(chosen >= 0, chosen // local, -1)
    earlier = torch.ones(chosen.shape[1], chosen.shape[1], dtype=torch.bool, device=chosen.device).tril(-1)
    again = ((ranks[:, :, None] == ranks[:, None, :]) & earlier).any(2)
    targets.copy_(torch.where(again, -1, ranks))


def copy_rows(x: Tensor, sources: Tensor, choices: int, out: Tensor) -> None:
    """out[slot] = x[sources[slot] // choices], all columns; rows of slots without a source stay as they are."""
    check_copy(x, sources, out)
    there = sources >= 0
    out[there] = x[(sources[there] // choices).long()]


def localize(
    chosen: Tensor, weights: Tensor, sources: Tensor, capacity: int, local: int, experts: Tensor, slot_weights: Tensor
) -> None:
    """For slots of ranks, `capacity` each: experts int32 [slots, choices], the row's experts numbered within the slot's
    rank, `local` of them (-1: elsewhere, none, or no row), and their weights fp32 (0)."""
    check_localize(chosen, weights, sources, experts, slot_weights)
    choices, ranks = chosen.shape[1], torch.arange(len(sources), device=chosen.device) // capacity
    row = (sources.clamp(min=0) // choices).long()
    number = chosen[row] - ranks[:, None] * local
    here = (sources >= 0)[:, None] & (chosen[row] >= 0) & (number >= 0) & (number < local)
    experts.copy_(torch.where(here, number, -1))
    slot_weights.copy_(torch.where(here, weights[row], 0))


def combine(y: Tensor, places: Tensor, weights: Tensor | None, added: Tensor | None, out: Tensor) -> None:
    """out[row] = sum over choices in order of weights[row, choice] (or 1) * y[places[row, choice]], plus added[row]."""
    check_combine(y, places, weights, added, out)
    total = torch.zeros(out.shape, dtype=torch.float64, device=y.device)
    for choice in range(places.shape[1]):
        place = places[:, choice]
        row = torch.where((place >= 0)[:, None], y[place.clamp(min=0).long()].double(), 0)
        total += row if weights is None else row * weights[:, choice, None].double()
    out.copy_(total if added is None else total + added.double())


def check_plan(chosen: Tensor, capacity: int, alignment: int, into: Plan) -> None:
    """Raises KernelError naming what does not fit. Groups beyond the plan's are the caller's mistake."""
    rows, choices = chosen.shape
    groups, slots = len(into.counts), len(into.sources)
    check_rows("chosen", chosen, (rows, choices), torch.int32)
    check_rows("places", into.places, (rows, choices), torch.int32)
    check_rows("offsets", into.offsets, (groups + 1,), torch.int32)
    if len(into.blocks) * PLAN_BLOCK < rows * choices or into.blocks.shape[1] != groups:
        raise KernelError(f"a plan for {len(into.blocks) * PLAN_BLOCK} entries", fix=f"make one for {rows} rows")
    if not (chosen.is_contiguous() and into.places.is_contiguous()):
        raise KernelError("chosen or places is not contiguous", fix="pass contiguous tensors")
    if capacity < 0 or (capacity == 0 and alignment < 1):
        raise KernelError(f"capacity {capacity}, alignment {alignment}", fix="give a capacity or an alignment")
    need = groups * capacity if capacity else rows * choices + groups * (alignment - 1)
    if slots < need or (capacity and capacity < rows):
        raise KernelError(f"{slots} slots, capacity {capacity}", fix=f"make room for {need} slots and all {rows} rows")


def check_copy(x: Tensor, sources: Tensor, out: Tensor) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    check_rows("sources", sources, (len(out),), torch.int32)
    check_rows("out", out, (len(out), x.shape[1]), x.dtype)
    check_rows("x", x, tuple(x.shape), x.dtype)
    if x.shape[1] * x.element_size() % 4 or x.stride(0) * x.element_size() % 4 or out.stride(0) * x.element_size() % 4:
        raise KernelError(f"rows of {x.shape[1] * x.element_size()} bytes", fix="use rows of whole 4-byte words")


def check_combine(y: Tensor, places: Tensor, weights: Tensor | None, added: Tensor | None, out: Tensor) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    (rows, choices), hidden = places.shape, y.shape[1]
    check_rows("y", y, tuple(y.shape))
    check_rows("places", places, (rows, choices), torch.int32)
    check_rows("out", out, (rows, hidden))
    if weights is not None:
        check_rows("weights", weights, (rows, choices), torch.float32)
    if added is not None:
        check_rows("added", added, (rows, hidden))
    if hidden % 64 or not places.is_contiguous() or (weights is not None and not weights.is_contiguous()):
        raise KernelError(f"{hidden} columns, or gaps in places or weights", fix="use a multiple of 64, contiguous")


def check_localize(chosen: Tensor, weights: Tensor, sources: Tensor, experts: Tensor, slot_weights: Tensor) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    slots, shape = len(sources), tuple(chosen.shape)
    check_rows("chosen", chosen, shape, torch.int32)
    check_rows("weights", weights, shape, torch.float32)
    check_rows("experts", experts, (slots, shape[1]), torch.int32)
    check_rows("slot_weights", slot_weights, (slots, shape[1]), torch.float32)
    if not all(each.is_contiguous() for each in (chosen, weights, sources, experts, slot_weights)):
        raise KernelError("an operand has gaps", fix="pass contiguous tensors")


OPS = DispatchOps(plan, destinations, copy_rows, localize, combine)
