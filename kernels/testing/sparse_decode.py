"""Operands of sparse decode, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference.sparse_decode import RecordKind, SparseCache, sparse_decode

# Output: weights and output are rounded to bf16 on the way (two roundings of 2**-9 each, at most).
RELATIVE, LSE_ABSOLUTE = 6e-3, 2e-3
# V3.2's keys times fp32 scales do not fit bf16: their scores are rounded as well.
LSE_ROUNDED_KEYS = 2e-2
# One channel: of the root mean square of its row, and of its own value (its largest key's rounding among them).
WORST_OF_ROW, WORST_OF_VALUE = 4e-2, 2e-2


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Operands of one call."""

    query: Tensor
    main: SparseCache
    extra: SparseCache | None
    sink: Tensor | None
    scale: float

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Output and lse, poisoned."""
        queries, heads, _ = self.query.shape
        output = torch.full((queries, heads, 512), torch.nan, dtype=torch.bfloat16, device=self.query.device)
        return output, torch.full((queries, heads), torch.nan, device=self.query.device)


def make_case(
    kinds: tuple[RecordKind, RecordKind | None], queries: int, heads: int, counts: tuple[int, int], tokens: int,
    page_tokens: int, device: torch.device, seed: int, hostile: bool = False, sink: bool = True,
) -> Case:  # fmt: skip
    """Random operands: `tokens` records a cache, `counts` indices a query. Hostile: invalid and repeated indices,
    lengths from 0 to all, a query that names nothing, and bytes that read as NaN wherever nothing is named."""
    draw = torch.Generator(device).manual_seed(seed)
    main = _cache(kinds[0], queries, counts[0], tokens, page_tokens, draw, hostile)
    extra = kinds[1] and _cache(kinds[1], queries, counts[1], tokens, page_tokens, draw, hostile)
    query = torch.randn(queries, heads, kinds[0].width, generator=draw, device=device).to(torch.bfloat16)
    sinks = torch.randn(heads, generator=draw, device=device) if sink else None
    return Case(query, main, extra or None, sinks, kinds[0].width ** -0.5)


def assert_case(case: Case, run: Callable[[Case], tuple[Tensor, Tensor]]) -> float:
    """Runs twice and compares with float64. Returns the relative error (Frobenius); AssertionError beyond tolerance."""
    found, lse = run(case)
    again, lse_again = run(case)
    if not (torch.equal(found, again) and torch.equal(lse, lse_again)):
        raise AssertionError("a repeated call gave other bits")
    expected, expected_lse = sparse_decode(case.query, case.main, case.extra, case.sink, case.scale)
    empty = expected_lse == torch.inf
    if not torch.equal(lse == torch.inf, empty) or bool((found[empty] != 0).any()):
        raise AssertionError("a query that names nothing must have output 0 and lse +inf")
    off = (lse - expected_lse)[~empty].abs()
    most = LSE_ROUNDED_KEYS if case.main.kind is RecordKind.V32 else LSE_ABSOLUTE
    if off.numel() and not float(off.max()) <= most:
        raise AssertionError(f"lse is off by {float(off.max()):.3g}")
    difference = found.to(torch.float64) - expected
    error = float(difference.norm() / expected.norm()) if bool((~empty).any()) else float(difference.norm())
    rows = expected.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-9)
    worst = float((difference.abs() - WORST_OF_ROW * rows - WORST_OF_VALUE * expected.abs()).max())
    if not (error <= RELATIVE and worst <= 0):
        raise AssertionError(f"relative error {error:.3g}, one channel {worst:.3g} beyond its tolerance")
    return error


def _cache(
    kind: RecordKind, queries: int, count: int, tokens: int, page_tokens: int, draw: torch.Generator, hostile: bool
) -> SparseCache:
    pages = _pages(kind, -(-tokens // page_tokens), page_tokens, draw)
    slots, device = pages.shape[0] * page_tokens, pages.device
    if not hostile:
        chosen = torch.rand(queries, slots, generator=draw, device=device).topk(count).indices
        return SparseCache(kind, pages, page_tokens, chosen.to(torch.int32))
    reach = slots // 2  # the other half is named by nobody
    indices = torch.randint(0, reach, (queries, count), generator=draw, device=device, dtype=torch.int32)
    wrong = torch.rand(queries, count, generator=draw, device=device) < 0.3
    indices[wrong] = torch.where(torch.arange(int(wrong.sum()), device=device) % 3 > 0, -1, 2147480000).int()
    lengths = torch.randint(0, count + 1, (queries,), generator=draw, device=device, dtype=torch.int32)
    lengths[0], lengths[-1] = 0, count
    indices[queries // 2] = -1
    cache = SparseCache(kind, pages, page_tokens, indices, lengths)
    named = torch.zeros(slots, dtype=torch.bool, device=device)
    named[indices[cache.valid()].long()] = True
    _poison(kind, pages, page_tokens, ~named)
    return cache


def _pages(kind: RecordKind, pages: int, page_tokens: int, draw: torch.Generator) -> Tensor:
    """Records of values of order one in padded pages; the padding reads as NaN."""
    device, records = draw.device, pages * page_tokens
    size = -(-page_tokens * kind.value // 64) * 64
    found = torch.full((pages, size), 0xFF, dtype=torch.uint8, device=device)
    normal = torch.randn(records, 512, generator=draw, device=device)
    codes = (normal * 16).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    bits = torch.randint(121, 126, (records, 16), generator=draw, device=device, dtype=torch.uint8)
    plain = normal[:, :64].to(torch.bfloat16).view(torch.uint8)
    if kind is RecordKind.V4:
        rows = torch.cat([codes[:, :448], plain], 1).view(pages, -1)
        found[:, : page_tokens * 576] = rows
        found[:, page_tokens * 576 : page_tokens * 584] = bits[:, :8].reshape(pages, -1)
        return found
    if kind is RecordKind.V32:
        scales = torch.rand(records, 4, generator=draw, device=device) / 16 + 1 / 32
        rows = torch.cat([codes, scales.view(torch.uint8), plain], 1)
    elif kind is RecordKind.V41_WINDOW:
        rows = torch.cat([codes, bits], 1)
    else:
        nibbles = torch.randint(0, 256, (records, 256), generator=draw, device=device, dtype=torch.uint8)
        scales = torch.rand(records, 32, generator=draw, device=device) / 2 + 2.0**-8
        rows = torch.cat([nibbles, scales.to(torch.float8_e4m3fn).view(torch.uint8)], 1)
    found[:, : page_tokens * kind.value] = rows.view(pages, -1)
    return found


def _poison(kind: RecordKind, pages: Tensor, page_tokens: int, where: Tensor) -> None:
    """Bytes of the records `where` (bool [slots]) become NaN in every format."""
    where = where.view(pages.shape[0], page_tokens)
    row = 576 if kind is RecordKind.V4 else kind.value
    rows = pages[:, : page_tokens * row].view(-1, page_tokens * row).unflatten(1, (page_tokens, row))
    rows[where] = 0xFF
    if kind is RecordKind.V4:
        scales = pages[:, page_tokens * 576 : page_tokens * 584].unflatten(1, (page_tokens, 8))
        scales[where] = 0xFF
