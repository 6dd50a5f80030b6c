"""Operands of sparse decode, friendly and hostile, and the check against float64. Knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.reference.sparse_decode import RecordKind, SparseCache, sparse_decode
from kernels.testing.attention import BF16, Results, compare, hostile_indices, poisoned, run_twice

TOLERANCE = replace(BF16, lse=2e-3)
# V3.2's keys times fp32 scales do not fit bf16: their scores are rounded as well.
ROUNDED_KEYS = replace(BF16, lse=2e-2)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Operands of one call."""

    query: Tensor
    main: SparseCache
    extra: SparseCache | None
    sink: Tensor | None
    scale: float

    def outputs(self) -> Results:
        """Output and lse, poisoned."""
        return poisoned(self.query)


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


def assert_case(case: Case, run: Callable[[Case], Results]) -> float:
    """Runs twice and compares with float64. Returns the relative error (Frobenius); AssertionError beyond tolerance."""
    found = run_twice(case, run)
    expected = sparse_decode(case.query, case.main, case.extra, case.sink, case.scale)
    return compare(found, expected, ROUNDED_KEYS if case.main.kind is RecordKind.V32 else TOLERANCE)


def _cache(
    kind: RecordKind, queries: int, count: int, tokens: int, page_tokens: int, draw: torch.Generator, hostile: bool
) -> SparseCache:
    pages = _pages(kind, -(-tokens // page_tokens), page_tokens, draw)
    slots, device = pages.shape[0] * page_tokens, pages.device
    if not hostile:
        chosen = torch.rand(queries, slots, generator=draw, device=device).topk(count).indices
        return SparseCache(kind, pages, page_tokens, chosen.to(torch.int32))
    indices, lengths = hostile_indices(queries, count, slots // 2, draw)  # the other half is named by nobody
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
