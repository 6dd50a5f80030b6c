"""What attention kernels are checked for against float64, and how such a check is itself checked. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

VALUE_WIDTH = 512
_Case = TypeVar("_Case")
Results: TypeAlias = tuple[Tensor, Tensor]  # output [..., heads, 512] and lse [..., heads]
SPOILS = ("bits", "lse", "empty", "value")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative error (Frobenius), of lse, and of one channel: of its row's root mean square and of its own value."""

    relative: float
    lse: float
    of_row: float
    of_value: float


# Weights, sums of spans and output are rounded to bf16 on the way (roundings of 2**-9 each, at most).
BF16 = Tolerance(6e-3, 1e-3, 4e-2, 2e-2)


def poisoned(query: Tensor) -> Results:
    """Room for what a kernel makes of `query` [..., heads, channels]: NaN everywhere."""
    shape, device = query.shape[:-1], query.device
    output = torch.full((*shape, VALUE_WIDTH), torch.nan, dtype=torch.bfloat16, device=device)
    return output, torch.full(tuple(shape), torch.nan, device=device)


def run_twice(case: _Case, run: Callable[[_Case], Results]) -> Results:
    """Results of a call; AssertionError where those of a second one have other bits."""
    output, lse = run(case)
    again, lse_again = run(case)
    if not (torch.equal(output, again) and torch.equal(lse, lse_again)):
        raise AssertionError("a repeated call gave other bits")
    return output, lse


def compare(found: Results, expected: Results, tolerance: Tolerance) -> float:
    """The relative error; AssertionError beyond tolerance, or where a row that sees no key is not 0 with lse +inf."""
    (output, lse), (wanted, wanted_lse) = found, expected
    empty = wanted_lse == torch.inf
    if not torch.equal(lse == torch.inf, empty) or bool((output[empty] != 0).any()):
        raise AssertionError("a row that sees no key must have output 0 and lse +inf")
    off = (lse - wanted_lse)[~empty].abs()
    if off.numel() and not float(off.max()) <= tolerance.lse:
        raise AssertionError(f"lse is off by {float(off.max()):.3g}")
    difference = output.to(torch.float64) - wanted
    error = float(difference.norm() / wanted.norm()) if bool((~empty).any()) else float(difference.norm())
    rows = wanted.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-9)
    worst = float((difference.abs() - tolerance.of_row * rows - tolerance.of_value * wanted.abs()).max())
    if not (error <= tolerance.relative and worst <= 0):
        raise AssertionError(f"relative error {error:.3g}, one channel {worst:.3g} beyond its tolerance")
    return error


def hostile_indices(queries: int, listed: int, reach: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices int32 [queries, listed] below `reach`, many of them invalid or repeated, all in one query; and lengths
    int32 [queries] from none to all."""
    device = draw.device
    indices = torch.randint(0, reach, (queries, listed), generator=draw, device=device, dtype=torch.int32)
    wrong = torch.rand(queries, listed, generator=draw, device=device) < 0.3
    indices[wrong] = torch.where(torch.arange(int(wrong.sum()), device=device) % 3 > 0, -1, 2_147_480_000).int()
    indices[queries // 2] = -1
    lengths = torch.randint(0, listed + 1, (queries,), generator=draw, device=device, dtype=torch.int32)
    lengths[0], lengths[-1] = 0, listed
    return indices, lengths


def assert_finds(
    case: _Case, run: Callable[[_Case], Results], check: Callable[[_Case, Callable[[_Case], Results]], object],
    spoil: str, empty: int,
) -> None:  # fmt: skip
    """AssertionError where `check` misses results of `run` that are spoilt: a bit of a repetition, an lse, an output of
    row `empty`, which sees no key, or one large value."""
    calls = []

    def wrong(given: _Case) -> Results:
        output, lse = run(given)
        calls.append(1)
        if spoil == "bits" and len(calls) == 2:
            output[1].view(-1)[0] += 1
        if spoil == "lse":
            lse[-1] += 0.5
        if spoil == "empty":
            output[empty].view(-1)[0] = torch.nan
        if spoil == "value":
            output[-1].view(-1)[5] += 1000
        return output, lse

    try:
        check(case, wrong)
    except AssertionError:
        return
    raise AssertionError(f"the check does not see that {spoil} is spoilt")


def assert_captures(launch: Callable[[Tensor, Tensor], None], results: Results) -> None:
    """AssertionError where `launch`, which fills an output and an lse, allocates, or fills others from a graph."""
    output, lse = (torch.full_like(result, torch.nan) for result in results)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    launch(output, lse)
    if torch.cuda.memory_stats()["allocation.all.allocated"] != before:
        raise AssertionError("a launch allocates")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(output, lse)
    output.fill_(torch.nan)
    graph.replay()
    if not (torch.equal(output, results[0]) and torch.equal(lse, results[1])):
        raise AssertionError("a graph gives other bits")
