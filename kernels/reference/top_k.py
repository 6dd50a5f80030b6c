"""The k best of every row by index, exactly, in torch: scores descending, and among equal ones the lower index first.

NaN ranks above +inf (as torch.topk has it), -0 equals +0. The chosen indices stand in ascending order, which makes the
result unique; rows shorter than k end in -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.errors import KernelError

MAX_COLUMNS = 1 << 21


def ordered(scores: Tensor) -> Tensor:
    """int64 in the order of fp32 `scores`, in [0, 2**32): NaN highest, both zeros equal."""
    scores = scores.float()
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)
    keys = torch.where(bits < 0, -1 - bits, bits + 0x8000_0000)
    return torch.where(scores.isnan(), 0xFFFF_FFFF, keys)


def top_k(scores: Tensor, count: int, lengths: Tensor | None = None) -> Tensor:
    """scores fp32 [rows, columns], lengths int32 [rows] or None -> int32 [rows, count]; behind a length nothing counts.

    Raises KernelError for operands no implementation takes.
    """
    check_operands(scores, count, lengths)
    rows, columns = scores.shape
    place = torch.arange(columns, device=scores.device)
    key = ordered(scores) * MAX_COLUMNS + (MAX_COLUMNS - 1 - place)
    inside = torch.ones_like(key, dtype=torch.bool) if lengths is None else place < lengths[:, None]
    key = key.masked_fill(~inside, -1)
    best = key.topk(min(count, columns), 1)
    chosen = best.indices.masked_fill(best.values < 0, columns).sort(1).values
    found = torch.full((rows, count), -1, dtype=torch.int32, device=scores.device)
    found[:, : chosen.shape[1]] = torch.where(chosen == columns, -1, chosen)
    return found


def check_operands(scores: Tensor, count: int, lengths: Tensor | None) -> None:
    """Raises KernelError naming the first operand that no implementation takes."""
    if scores.dtype != torch.float32 or scores.ndim != 2 or scores.stride(1) != 1:
        found = f"{scores.dtype} {list(scores.shape)}"
        raise KernelError(f"scores is {found}", fix="pass fp32 [rows, columns] with adjacent columns")
    if scores.shape[1] > MAX_COLUMNS or scores.stride(0) % 4 or scores.data_ptr() % 16:
        raise KernelError(
            f"scores has rows of {scores.shape[1]} columns, {scores.stride(0)} apart",
            fix=f"at most {MAX_COLUMNS} columns, rows that start at multiples of 16 bytes",
        )
    if count < 1:
        raise KernelError(f"count is {count}", fix="ask for at least one")
    if lengths is not None and (lengths.dtype != torch.int32 or lengths.shape != scores.shape[:1]):
        raise KernelError(f"lengths is {lengths.dtype} {list(lengths.shape)}", fix="pass int32 [rows]")
