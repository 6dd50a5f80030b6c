"""Operands of dense decode, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.dense_decode import WIDTH, PagedLatents, PagedRecords, dense_decode
from kernels.testing.attention import BF16, Results, Tolerance, compare, poisoned, run_twice

# Queries and weights are rounded to E4M3 (2**-4 each, at most); scores of hostile keys have a spread of two.
FP8 = Tolerance(8e-2, 3.5e-1, 5e-1, 2e-1)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Operands of one call."""

    query: Tensor
    cache: PagedLatents | PagedRecords
    scale: float

    def outputs(self) -> Results:
        """Output and lse, poisoned."""
        return poisoned(self.query)


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


def assert_case(case: Case, run: Callable[[Case], Results], tolerance: Tolerance = BF16) -> float:
    """Runs twice and compares with float64. Returns the relative error (Frobenius); AssertionError beyond tolerance."""
    return compare(run_twice(case, run), dense_decode(case.query, case.cache, case.scale), tolerance)


def _hostile(pages: Tensor, draw: torch.Generator) -> Tensor:
    """The same in rows and pages with NaN between them, and a few keys a hundred times as large as the others."""
    count, tokens, width = pages.shape
    spread = torch.full((count, tokens * (width + 8) + 16), torch.nan, dtype=pages.dtype, device=pages.device)
    large = torch.rand(count, tokens, 1, generator=draw, device=pages.device) < 0.02
    found = spread[:, : tokens * (width + 8)].view(count, tokens, width + 8) if count else spread
    found = found[:, :, :width]
    found.copy_(torch.where(large, pages * 20, pages))
    return found
