"""Operands of dense decode, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.dense_decode import VALUE_WIDTH, WIDTH, PagedLatents, PagedRecords, dense_decode


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative error (Frobenius), of lse, and of one channel: of its row's root mean square and of its own value."""

    relative: float
    lse: float
    of_row: float
    of_value: float


# Weights and output are rounded to bf16 on the way (two roundings of 2**-9 each, at most).
BF16 = Tolerance(6e-3, 1e-3, 4e-2, 2e-2)
# Queries and weights are rounded to E4M3 (2**-4 each, at most); scores of hostile keys have a spread of two.
FP8 = Tolerance(8e-2, 3.5e-1, 5e-1, 2e-1)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Operands of one call."""

    query: Tensor
    cache: PagedLatents | PagedRecords
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
    tables, named = _tables(lengths, page_tokens, draw)
    pages = torch.randn(*named.shape, WIDTH, generator=draw, device=device).to(torch.bfloat16)
    if hostile:
        pages = _hostile(pages, draw)
        pages[~named] = torch.nan
        pages[:, :, ::3][~named] = torch.inf
    query = torch.randn(len(lengths), tokens, heads, WIDTH, generator=draw, device=device).to(torch.bfloat16)
    cache = PagedLatents(pages, tables, torch.tensor(lengths, dtype=torch.int32, device=device))
    return Case(query, cache, WIDTH**-0.5)


def make_record_case(
    lengths: Sequence[int], tokens: int, heads: int, page_tokens: int, device: torch.device, seed: int,
    hostile: bool = False,
) -> Case:  # fmt: skip
    """The same over FP8 records. Hostile: bytes that read as NaN wherever no key lies, between pages as well, and keys'
    scales that grow along a sequence by two hundred times."""
    draw = torch.Generator(device).manual_seed(seed)
    tables, named = _tables(lengths, page_tokens, draw)
    count = named.shape[0] * page_tokens
    normal = torch.randn(count, WIDTH, generator=draw, device=device)
    codes = (normal[:, :512] * 64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(count, 4, generator=draw, device=device) + 0.5) / 64
    if hostile:
        ranks = torch.zeros(named.shape, device=device)
        for sequence, length in enumerate(lengths):
            used = tables[sequence, : -(-length // page_tokens)].long()
            ranks[used] = torch.arange(used.numel(), device=device, dtype=torch.float32)[:, None] / max(used.numel(), 1)
        scales *= torch.exp2(8 * ranks.flatten()[:, None] - 7)
    plain = normal[:, 512:].to(torch.bfloat16).view(torch.uint8)
    records = torch.cat([codes, scales.view(torch.uint8), plain], 1).view(*named.shape, -1)
    records[~named] = 0xFF if hostile else 0
    pages = torch.full((named.shape[0], page_tokens * records.shape[2] + 32), 0xFF, dtype=torch.uint8, device=device)
    pages[:, :-32] = records.flatten(1)
    query = torch.randn(len(lengths), tokens, heads, WIDTH, generator=draw, device=device).to(torch.bfloat16)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    return Case(query, PagedRecords(pages, page_tokens, tables, sizes), WIDTH**-0.5)


def _tables(lengths: Sequence[int], page_tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scattered pages of every sequence, and whether each place of each page holds a key, bool [pages, page_tokens]."""
    device = draw.device
    counts = [-(-length // page_tokens) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=draw, device=device).int()
    tables = torch.full((len(lengths), max(*counts, 1) + 1), 2_147_480_000, dtype=torch.int32, device=device)
    named = torch.zeros(len(order), page_tokens, dtype=torch.bool, device=device)
    first = 0
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[sequence, :count] = order[first : first + count]
        places = torch.arange(count * page_tokens, device=device).view(count, page_tokens)
        named[order[first : first + count].long()] = places < length
        first += count
    return tables, named


def assert_case(case: Case, run: Callable[[Case], tuple[Tensor, Tensor]], tolerance: Tolerance = BF16) -> float:
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
    if off.numel() and not float(off.max()) <= tolerance.lse:
        raise AssertionError(f"lse is off by {float(off.max()):.3g}")
    difference = found.to(torch.float64) - expected
    error = float(difference.norm() / expected.norm()) if bool((~empty).any()) else float(difference.norm())
    rows = expected.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-9)
    worst = float((difference.abs() - tolerance.of_row * rows - tolerance.of_value * expected.abs()).max())
    if not (error <= tolerance.relative and worst <= 0):
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
