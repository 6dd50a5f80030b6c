"""Operands of sparse prefill, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.sparse_prefill import NamedLatents, sparse_prefill
from kernels.testing.attention import BF16, Results, compare, hostile_indices, poisoned, run_twice


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Operands of one call."""

    query: Tensor
    named: NamedLatents
    sink: Tensor | None
    scale: float

    def outputs(self) -> Results:
        """Output and lse, poisoned."""
        return poisoned(self.query)


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
    if not hostile:
        indices = torch.randint(0, slots, (queries, listed), generator=draw, device=device, dtype=torch.int32)
        return Case(query, NamedLatents(keys, indices), sinks, width**-0.5)
    indices, lengths = hostile_indices(queries, listed, slots // 2, draw)  # the other half is named by nobody
    spread = torch.full((slots, width + 8), torch.nan, dtype=torch.bfloat16, device=device)
    spread[:, :width] = torch.where(torch.rand(slots, 1, generator=draw, device=device) < 0.02, keys * 20, keys)
    named = NamedLatents(spread[:, :width], indices, lengths)
    unnamed = torch.ones(slots, dtype=torch.bool, device=device)
    unnamed[indices[named.valid()].long()] = False
    spread[unnamed] = torch.nan
    spread[:, ::3][unnamed] = torch.inf
    return Case(query, named, sinks, width**-0.5)


def assert_case(case: Case, run: Callable[[Case], Results], checked: int = 256) -> float:
    """Runs twice and compares the first and last `checked` queries with float64; AssertionError beyond tolerance.

    Returns the relative error (Frobenius).
    """
    output, lse = run_twice(case, run)
    queries = len(case.query)
    chosen = torch.unique(torch.cat([torch.arange(min(checked, queries)), torch.arange(queries)[-checked:]]))
    chosen = chosen.to(case.query.device)
    lengths = None if case.named.lengths is None else case.named.lengths[chosen]
    part = NamedLatents(case.named.keys, case.named.indices[chosen], lengths)
    expected = sparse_prefill(case.query[chosen], part, case.sink, case.scale)
    return compare((output[chosen], lse[chosen]), expected, BF16)
