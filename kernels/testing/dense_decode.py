"""Operands of dense decode, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.dense_decode import VALUE_WIDTH, WIDTH, PagedLatents, dense_decode

# Weights and output are rounded to bf16 on the way (two roundings of 2**-9 each, at most).
RELATIVE, LSE_ABSOLUTE = 6e-3, 1e-3
# One channel: of the root mean square of its row, and of its own value.
WORST_OF_ROW, WORST_OF_VALUE = 4e-2, 2e-2


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Operands of one call."""

    query: Tensor
    cache: PagedLatents
    scale: float

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Output and lse, poisoned."""
        shape, device = self.query.shape[:3], self.query.device
        output = torch.full((*shape, VALUE_WIDTH), torch.nan, dtype=torch.bfloat16, device=device)
        return output, torch.full(tuple(shape), torch.nan, device=device)


def make_case(
    lengths: Sequence[int], tokens: int, heads: int, page_tokens: int, device: torch.device, seed: int,
    hostile: bool = False,
) -> Case:  # fmt: skip
    """Random operands over scattered pages. Hostile: NaN and infinity wherever no key lies, tables that end in numbers
    of no page, rows of pages apart from each other, and scores whose peak rises by hundreds along a sequence."""
    draw = torch.Generator(device).manual_seed(seed)
    counts = [-(-length // page_tokens) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=draw, device=device).int()
    tables = torch.full((len(lengths), max(*counts, 1) + 1), 2_147_480_000, dtype=torch.int32, device=device)
    pages = torch.randn(len(order), page_tokens, WIDTH, generator=draw, device=device).to(torch.bfloat16)
    if hostile:
        pages = _hostile(pages, draw)
    named = torch.zeros(len(order), page_tokens, dtype=torch.bool, device=device)
    first = 0
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[sequence, :count] = order[first : first + count]
        places = torch.arange(count * page_tokens, device=device).view(count, page_tokens)
        named[order[first : first + count].long()] = places < length
        first += count
    if hostile:
        pages[~named] = torch.nan
        pages[:, :, ::3][~named] = torch.inf
    query = torch.randn(len(lengths), tokens, heads, WIDTH, generator=draw, device=device).to(torch.bfloat16)
    cache = PagedLatents(pages, tables, torch.tensor(lengths, dtype=torch.int32, device=device))
    return Case(query, cache, WIDTH**-0.5)


def assert_case(case: Case, run: Callable[[Case], tuple[Tensor, Tensor]]) -> float:
    """Runs twice and compares with float64. Returns the relative error (Frobenius); AssertionError beyond tolerance."""
    found, lse = run(case)
    again, lse_again = run(case)
    if not (torch.equal(found, again) and torch.equal(lse, lse_again)):
        raise AssertionError("a repeated call gave other bits")
    expected, expected_lse = dense_decode(case.query, case.cache, case.scale)
    empty = expected_lse == torch.inf
    if not torch.equal(lse == torch.inf, empty) or bool((found[empty] != 0).any()):
        raise AssertionError("a token that sees no key must have output 0 and lse +inf")
    off = (lse - expected_lse)[~empty].abs()
    if off.numel() and not float((off - LSE_ABSOLUTE).max()) <= 0:
        raise AssertionError(f"lse is off by {float(off.max()):.3g}")
    difference = found.to(torch.float64) - expected
    error = float(difference.norm() / expected.norm()) if bool((~empty).any()) else float(difference.norm())
    rows = expected.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-9)
    worst = float((difference.abs() - WORST_OF_ROW * rows - WORST_OF_VALUE * expected.abs()).max())
    if not (error <= RELATIVE and worst <= 0):
        raise AssertionError(f"relative error {error:.3g}, one channel {worst:.3g} beyond its tolerance")
    return error


def _hostile(pages: Tensor, draw: torch.Generator) -> Tensor:
    """The same in rows and pages with NaN between them, and a few keys a hundred times as large as the others."""
    count, tokens, width = pages.shape
    spread = torch.full((count, tokens * (width + 8) + 16), torch.nan, dtype=pages.dtype, device=pages.device)
    large = torch.rand(count, tokens, 1, generator=draw, device=pages.device) < 0.02
    found = spread[:, : tokens * (width + 8)].view(count, tokens, width + 8) if count else spread
    found = found[:, :, :width]
    found.copy_(torch.where(large, pages * 20, pages))
    return found
