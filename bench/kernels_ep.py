"""Layouts, permutation and weighted sums of expert parallelism, timed. Knows their shapes; the clock is elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.kernels_rows import checked
from bench.kernels_tile import CUDA, Shape, measured
from bench.kernels_timing import Ceilings
from bench.table import Row
from kernels.dispatch import Alone, make_plan
from kernels.testing import dispatch
from kernels.triton.dispatch import OPS, combine, copy_rows, plan

Prepared = tuple[Callable[[], object], Callable[[], None]]
EXPERTS, CHOICES, HIDDEN = 256, 8, 7168


def ep_rows(ceilings: Ceilings, seed: int) -> Iterator[Row]:
    """A round of one process first, then each shape."""
    torch.manual_seed(seed)
    yield checked("dispatch and combine, one process", lambda: dispatch.check_round(OPS, Alone(), CUDA, 100, 1024))
    for rows in (4096, 128):
        entries = rows * CHOICES
        yield from measured(
            Shape(f"plan {rows} x {CHOICES} of {EXPERTS}", entries * 12, lambda r=rows: _plan(r)), ceilings
        )
        nbytes = (entries + rows) * HIDDEN
        yield from measured(Shape(f"permute {rows} x {CHOICES}, e4m3", nbytes, lambda r=rows: _permute(r)), ceilings)
        nbytes = (entries + rows) * HIDDEN * 2
        yield from measured(Shape(f"combine {rows} x {CHOICES}, bf16", nbytes, lambda r=rows: _combine(r)), ceilings)


def _plan(rows: int) -> Prepared:
    chosen = dispatch.make_chosen(rows, CHOICES, EXPERTS, CUDA, 1, hostile=False)
    into = make_plan(rows, CHOICES, EXPERTS, rows * CHOICES + EXPERTS * 127, CUDA)
    return lambda: plan(chosen, 0, 128, into), lambda: dispatch.check_plans(OPS, CUDA, rows, CHOICES, EXPERTS)


def _permute(rows: int) -> Prepared:
    chosen = dispatch.make_chosen(rows, CHOICES, EXPERTS, CUDA, 1, hostile=False)
    into = make_plan(rows, CHOICES, EXPERTS, rows * CHOICES, CUDA)
    plan(chosen, 0, 1, into)
    x = torch.randn(rows, HIDDEN, device=CUDA).to(torch.float8_e4m3fn)
    out = torch.empty(rows * CHOICES, HIDDEN, dtype=torch.float8_e4m3fn, device=CUDA)
    check = lambda: dispatch.check_permutation(OPS, CUDA, min(rows, 300), CHOICES, EXPERTS, HIDDEN)  # noqa: E731
    return lambda: copy_rows(x, into.sources, CHOICES, out), check


def _combine(rows: int) -> Prepared:
    chosen = dispatch.make_chosen(rows, CHOICES, EXPERTS, CUDA, 1, hostile=False)
    into = make_plan(rows, CHOICES, EXPERTS, rows * CHOICES, CUDA)
    plan(chosen, 0, 1, into)
    y = torch.randn(rows * CHOICES, HIDDEN, device=CUDA).to(torch.bfloat16)
    weights, out = torch.rand(rows, CHOICES, device=CUDA), torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=CUDA)
    check = lambda: dispatch.check_permutation(OPS, CUDA, min(rows, 300), CHOICES, EXPERTS, HIDDEN)  # noqa: E731
    return lambda: combine(y, into.places, weights, None, out), check
