"""Sparse MLA decode in torch: attention of every query over records that a list of slots names, from two caches.

out[h] = sum_i w_i v_i, w = softmax over i of scale * q_h . k_i, over the valid slots of `main` and of `extra` together;
k is the whole record, v its first 512 channels. A sink adds exp(sink_h) to the denominator alone. lse is the logarithm
of the sum without the sink; a query without a valid slot has output 0 and lse +inf (as FlashMLA has it).

Records (bytes): V4 584 = 448 E4M3 + 64 bf16 in a page's rows of 576, then, behind the rows of the page or where
`scales` are, 8 per token (an E8M0 scale per 64 channels and a pad); V3.2 656 = 512 E4M3, 4 fp32 scales, 64 bf16; V4.1
window 528 = 512 E4M3, an E8M0 scale per 32; V4.1 entry 288 = 512 E2M1 (low nibble first), an E4M3 scale per 16. The
last three lie one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kernels.errors import KernelError

VALUE_WIDTH = 512
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class RecordKind(Enum):
    """A record's layout; the value is its size in bytes."""

    V4 = 584
    V32 = 656
    V41_WINDOW = 528
    V41_ENTRY = 288

    @property
    def width(self) -> int:
        """Channels."""
        return 576 if self is RecordKind.V32 else 512


@dataclass(frozen=True, slots=True, eq=False)
class SparseCache:
    """pages uint8 [pages, >= page_tokens * record]; indices int32 [queries, n]; lengths int32 [queries] or None.

    An index is page * page_tokens + place in the page. Those outside the cache (-1) and those at or behind a query's
    length name nothing: no byte of theirs is read.
    """

    kind: RecordKind
    pages: Tensor
    page_tokens: int
    indices: Tensor
    lengths: Tensor | None = None
    scales: Tensor | None = None  # uint8 [pages, page_tokens * 8] of V4's, where they are not behind a page's rows

    @property
    def slots(self) -> int:
        return self.pages.shape[0] * self.page_tokens

    def valid(self) -> Tensor:
        """bool [queries, n]: the index names a record."""
        found = (self.indices >= 0) & (self.indices < self.slots)
        if self.lengths is not None:
            found &= torch.arange(self.indices.shape[1], device=self.indices.device) < self.lengths[:, None]
        return found


def sparse_decode(
    query: Tensor, main: SparseCache, extra: SparseCache | None, sink: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """query [queries, heads, width] -> float64 (output [queries, heads, 512], lse [queries, heads])."""
    caches = [main] if extra is None else [main, extra]
    valid = torch.cat([cache.valid() for cache in caches], 1)
    keys = torch.cat([_named(cache) for cache in caches], 1)
    scores = torch.einsum("qhc,qnc->qhn", query.to(torch.float64), keys) * scale
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    whole = lse if sink is None else torch.logaddexp(lse, sink.to(torch.float64))
    empty = ~valid.any(1)[:, None]
    weights = (scores - whole[..., None]).exp().masked_fill(empty[..., None], 0)
    return weights @ keys[..., :VALUE_WIDTH], lse.masked_fill(empty, torch.inf)


def unpack(kind: RecordKind, pages: Tensor, page_tokens: int, scales: Tensor | None = None) -> Tensor:
    """Every record of uint8 [pages, >= page_tokens * record], float64 [pages * page_tokens, width]."""
    if kind is RecordKind.V4:
        rows = pages[:, : page_tokens * 576].reshape(-1, 576)
        apart = pages[:, page_tokens * 576 : page_tokens * 584] if scales is None else scales
        scales = apart.reshape(-1, 8)[:, :7]
        return torch.cat([_scaled(_e4m3(rows[:, :448]), _e8m0(scales)), _bf16(rows[:, 448:])], 1)
    rows = pages[:, : page_tokens * kind.value].reshape(-1, kind.value)
    if kind is RecordKind.V32:
        scales = rows[:, 512:528].contiguous().view(torch.float32).to(torch.float64)
        return torch.cat([_scaled(_e4m3(rows[:, :512]), scales), _bf16(rows[:, 528:])], 1)
    if kind is RecordKind.V41_WINDOW:
        return _scaled(_e4m3(rows[:, :512]), _e8m0(rows[:, 512:]))
    nibbles = torch.stack([rows[:, :256] & 15, rows[:, :256] >> 4], -1).flatten(1).long()
    table = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), dtype=torch.float64, device=pages.device)
    return _scaled(table[nibbles], _e4m3(rows[:, 256:]))


def check_operands(
    query: Tensor, main: SparseCache, extra: SparseCache | None, sink: Tensor | None, output: Tensor, lse: Tensor
) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    queries, heads = query.shape[:2]
    wanted = [
        ("query", query, torch.bfloat16, (queries, heads, main.kind.width)),
        ("output", output, torch.bfloat16, (queries, heads, VALUE_WIDTH)),
        ("lse", lse, torch.float32, (queries, heads)),
    ]
    if sink is not None:
        wanted.append(("sink", sink, torch.float32, (heads,)))
    for name, cache in (("main", main), ("extra", extra)):
        if cache is None:
            continue
        wanted.append((f"{name}.indices", cache.indices, torch.int32, (queries, cache.indices.shape[-1])))
        if cache.lengths is not None:
            wanted.append((f"{name}.lengths", cache.lengths, torch.int32, (queries,)))
        _check_pages(name, cache)
        if cache.kind.width != main.kind.width:
            raise KernelError(f"{name}: {cache.kind} is not as wide as {main.kind}", fix="use records of one model")
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise KernelError(f"{name} is {found}", fix=f"pass contiguous {dtype} {list(shape)}")


def _check_pages(name: str, cache: SparseCache) -> None:
    """Pages may stand apart: one layer's among those of others."""
    apart = cache.scales
    pages, size = cache.pages, cache.page_tokens * (cache.kind.value if apart is None else cache.kind.value - 8)
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.stride(1) != 1 or pages.shape[1] < size:
        found = f"{pages.dtype} {list(pages.shape)}, bytes {pages.stride(-1)} apart"
        fix = f"pass torch.uint8 [pages, >= {size}], bytes adjacent"
        raise KernelError(f"{name}: pages are {found}, for {cache.page_tokens} records of {cache.kind.value}", fix=fix)
    if pages.stride(0) % 16 or pages.data_ptr() % 16:
        message = f"{name}: pages stand {pages.stride(0)} bytes apart"
        raise KernelError(message, fix="let pages begin at multiples of 16 bytes")
    if apart is not None and (
        cache.kind is not RecordKind.V4 or apart.dtype != torch.uint8 or apart.stride() != pages.stride()
        or apart.shape[1] < 8 * cache.page_tokens or (apart.data_ptr() - pages.data_ptr()) % 8
    ):  # fmt: skip
        message = f"{name}: scales are {apart.dtype} {list(apart.shape)}, {apart.stride(0)} bytes apart"
        raise KernelError(message, fix="pass V4's, 8 bytes a record, in the same storage as the pages")


def _named(cache: SparseCache) -> Tensor:
    """Named records, float64 [queries, n, width]; zero where the index names nothing."""
    valid = cache.valid()
    found = unpack(cache.kind, cache.pages, cache.page_tokens, cache.scales)[
        torch.where(valid, cache.indices, 0).long()
    ]
    return found.masked_fill(~valid[..., None], 0)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    return (values.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def _e4m3(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float64)


def _e8m0(codes: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(codes.shape, dtype=torch.float64, device=codes.device), codes.to(torch.int32) - 127)


def _bf16(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.bfloat16).to(torch.float64)
