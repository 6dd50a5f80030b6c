"""Operands of sparse prefill, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.sparse_prefill import VALUE_WIDTH, NamedLatents, sparse_prefill

# Weights and output are rounded to bf16 on the way (two roundings of 2**-9 each, at most).
RELATIVE, LSE_ABSOLUTE = 6e-3, 1e-3
# One channel: of the root mean square of its row, and of its own value.
WORST_OF_ROW, WORST_OF_VALUE = 4e-2, 2e-2


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Operands of one call."""

    query: Tensor
    named: NamedLatents
    sink: Tensor | None
    scale: float

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Output and lse, poisoned."""
        queries, heads, _ = self.query.shape
        output = torch.full((queries, heads, VALUE_WIDTH), torch.nan, dtype=torch.bfloat16, device=self.query.device)
        return output, torch.full((queries, heads), torch.nan, device=self.query.device)


def make_case(
    queries: int, heads: int, width: int, listed: int, slots: int, device: torch.device, seed: int,
    hostile: bool = False, sink: bool = True,
) -> Case:  # fmt: skip
    """Random operands. Hostile: invalid and repeated indices, lengths from none to all, a query that names nothing, NaN
    and infinity in every latent that nobody names and between rows, and a few latents twenty times as large."""
    draw = torch.Generator(device).manual_seed(seed)
    query = torch.randn(queries, heads, width, generator=draw, device=device).to(torch.bfloat16)
    keys = torch.randn(slots, width, generator=draw, device=device).to(torch.bfloat16)
    sinks = torch.randn(heads, generator=draw, device=device) if sink else None
    indices = torch.randint(0, slots, (queries, listed), generator=draw, device=device, dtype=torch.int32)
    if not hostile:
        return Case(query, NamedLatents(keys, indices), sinks, width**-0.5)
    indices //= 2  # the other half is named by nobody
    wrong = torch.rand(queries, listed, generator=draw, device=device) < 0.3
    indices[wrong] = torch.where(torch.arange(int(wrong.sum()), device=device) % 3 > 0, -1, 2_147_480_000).int()
    indices[queries // 2] = -1
    lengths = torch.randint(0, listed + 1, (queries,), generator=draw, device=device, dtype=torch.int32)
    lengths[0], lengths[-1] = 0, listed
    spread = torch.full((slots, width + 8), torch.nan, dtype=torch.bfloat16, device=device)
    spread[:, :width] = torch.where(torch.rand(slots, 1, generator=draw, device=device) < 0.02, keys * 20, keys)
    named = NamedLatents(spread[:, :width], indices, lengths)
    unnamed = torch.ones(slots, dtype=torch.bool, device=device)
    unnamed[indices[named.valid()].long()] = False
    spread[unnamed] = torch.nan
    spread[:, ::3][unnamed] = torch.inf
    return Case(query, named, sinks, width**-0.5)


def assert_case(case: Case, run: Callable[[Case], tuple[Tensor, Tensor]], checked: int = 256) -> float:
    """Runs twice and compares the first and last `checked` queries with float64; AssertionError beyond tolerance.

    Returns the relative error (Frobenius).
    """
    whole, lses = run(case)
    again, lse_again = run(case)
    if not (torch.equal(whole, again) and torch.equal(lses, lse_again)):
        raise AssertionError("a repeated call gave other bits")
    queries = len(case.query)
    chosen = torch.unique(torch.cat([torch.arange(min(checked, queries)), torch.arange(queries)[-checked:]]))
    chosen = chosen.to(case.query.device)
    lengths = None if case.named.lengths is None else case.named.lengths[chosen]
    part = NamedLatents(case.named.keys, case.named.indices[chosen], lengths)
    expected, expected_lse = sparse_prefill(case.query[chosen], part, case.sink, case.scale)
    return _compare(whole[chosen], lses[chosen], expected, expected_lse)


def _compare(found: Tensor, lse: Tensor, expected: Tensor, expected_lse: Tensor) -> float:
    empty = expected_lse == torch.inf
    if not torch.equal(lse == torch.inf, empty) or bool((found[empty] != 0).any()):
        raise AssertionError("a query that names nothing must have output 0 and lse +inf")
    off = (lse - expected_lse)[~empty].abs()
    if off.numel() and not float(off.max()) <= LSE_ABSOLUTE:
        raise AssertionError(f"lse is off by {float(off.max()):.3g}")
    difference = found.to(torch.float64) - expected
    error = float(difference.norm() / expected.norm()) if bool((~empty).any()) else float(difference.norm())
    rows = expected.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-9)
    worst = float((difference.abs() - WORST_OF_ROW * rows - WORST_OF_VALUE * expected.abs()).max())
    if not (error <= RELATIVE and worst <= 0):
        raise AssertionError(f"relative error {error:.3g}, one channel {worst:.3g} beyond its tolerance")
    return error
