"""Dense MLA decode in torch: attention of a sequence's last tokens over all of its keys, which lie in pages.

out[t, h] = sum_i w_i v_i, w = softmax over i of scale * q_th . k_i; k is the whole row of 576 channels, v the first 512
of them. Of a sequence of n keys and t query tokens (the last t of the n), token j sees the first n - t + 1 + j keys.
lse is the logarithm of the sum; a token that sees no key has output 0 and lse +inf (as FlashMLA has it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.sparse_decode import RecordKind, unpack

WIDTH, VALUE_WIDTH = 576, 512


@dataclass(frozen=True, slots=True, eq=False)
class PagedLatents:
    """pages bf16 [pages, page_tokens, 576]; tables int32 [batch, n], a sequence's pages in order; lengths int32
    [batch].

    No byte behind a sequence's length matters, and no entry of a table behind its last page.
    """

    pages: Tensor
    tables: Tensor
    lengths: Tensor

    @property
    def page_tokens(self) -> int:
        return int(self.pages.shape[1])

    def rows(self, sequence: int) -> Tensor:
        """The keys of a sequence, [length, 576]."""
        length = max(int(self.lengths[sequence]), 0)
        named = self.tables[sequence, : -(-length // self.page_tokens)].long()
        return self.pages[named].flatten(0, 1)[:length]


@dataclass(frozen=True, slots=True, eq=False)
class PagedRecords:
    """pages uint8 [pages, >= page_tokens * 656], V3.2's records one after another (reference/sparse_decode.py); tables
    and lengths as those of `PagedLatents`."""

    pages: Tensor
    page_tokens: int
    tables: Tensor
    lengths: Tensor

    def rows(self, sequence: int) -> Tensor:
        """The keys of a sequence, float64 [length, 576]."""
        length = max(int(self.lengths[sequence]), 0)
        named = self.tables[sequence, : -(-length // self.page_tokens)].long()
        return unpack(RecordKind.V32, self.pages[named], self.page_tokens)[:length]


def dense_decode(query: Tensor, cache: PagedLatents | PagedRecords, scale: float) -> tuple[Tensor, Tensor]:
    """query [batch, tokens, heads, 576] -> float64 (output [batch, tokens, heads, 512], lse [batch, tokens, heads])."""
    batch, tokens, heads, _ = query.shape
    output = torch.zeros(batch, tokens, heads, VALUE_WIDTH, dtype=torch.float64, device=query.device)
    lse = torch.full((batch, tokens, heads), torch.inf, dtype=torch.float64, device=query.device)
    for sequence in range(batch):
        keys = cache.rows(sequence).to(torch.float64)
        for token in range(max(tokens - len(keys), 0), tokens):
            seen = keys[: len(keys) - tokens + 1 + token]
            scores = query[sequence, token].to(torch.float64) @ seen.T * scale
            lse[sequence, token] = scores.logsumexp(-1)
            output[sequence, token] = scores.softmax(-1) @ seen[:, :VALUE_WIDTH]
    return output, lse


def check_operands(query: Tensor, cache: PagedLatents | PagedRecords, output: Tensor, lse: Tensor) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    batch, tokens, heads = query.shape[:3]
    wanted = [
        ("query", query, torch.bfloat16, (batch, tokens, heads, WIDTH)),
        ("output", output, torch.bfloat16, (batch, tokens, heads, VALUE_WIDTH)),
        ("lse", lse, torch.float32, (batch, tokens, heads)),
        ("tables", cache.tables, torch.int32, (batch, cache.tables.shape[-1])),
        ("lengths", cache.lengths, torch.int32, (batch,)),
    ]
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise KernelError(f"{name} is {found}", fix=f"pass contiguous {dtype} {list(shape)}")
    if isinstance(cache, PagedLatents):
        _check_latents(cache.pages)
    else:
        _check_records(cache.pages, cache.page_tokens)


def _check_latents(pages: Tensor) -> None:
    if pages.dtype != torch.bfloat16 or pages.dim() != 3 or pages.shape[2] != WIDTH or pages.stride(2) != 1:
        found = f"{pages.dtype} {list(pages.shape)}"
        raise KernelError(f"pages are {found}", fix=f"pass torch.bfloat16 [pages, page_tokens, {WIDTH}]")
    if pages.stride(0) % 8 or pages.stride(1) % 8 or pages.data_ptr() % 16:
        raise KernelError(f"pages have strides {pages.stride()}", fix="align pages and rows to 16 bytes")


def _check_records(pages: Tensor, page_tokens: int) -> None:
    size = page_tokens * RecordKind.V32.value
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] < size or pages.stride(1) != 1:
        found = f"{pages.dtype} {list(pages.shape)}"
        raise KernelError(f"pages are {found}", fix=f"pass torch.uint8 [pages, >= {size}]")
    if pages.stride(0) % 16 or pages.data_ptr() % 16:
        raise KernelError(f"pages have strides {pages.stride()}", fix="align pages to 16 bytes")
