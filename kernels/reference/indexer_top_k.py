"""The best keys of every token by index score, in torch: scores as in mqa_logits, the order and ties of top_k.

Of the keys a token sees the `count` best are chosen, NaN above +inf and the lower index of equal scores first. They
stand in ascending order; tokens that see fewer keys end in -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.mqa_logits import MqaOperands, mqa_logits
from kernels.reference.top_k import MAX_COLUMNS, ordered


def indexer_top_k(given: MqaOperands, columns: int, count: int, precision: torch.dtype = torch.float32) -> Tensor:
    """int32 [tokens, count] of keys before `columns`. Raises KernelError for operands no implementation takes."""
    return best_of(mqa_logits(given, columns, precision), given, count)


def best_of(scores: Tensor, given: MqaOperands, count: int) -> Tensor:
    """The same from scores [tokens, columns] that are known."""
    tokens, columns = scores.shape
    if count < 1 or columns > MAX_COLUMNS:
        raise KernelError(f"{count} of {columns} keys", fix=f"ask for at least one of at most {MAX_COLUMNS}")
    place = torch.arange(columns, device=scores.device)
    seen = place < given.ends[:, None]
    if given.starts is not None:
        seen &= place >= given.starts[:, None]
    keys = (ordered(scores) * MAX_COLUMNS + (MAX_COLUMNS - 1 - place)).masked_fill(~seen, -1)
    best = keys.topk(min(count, columns), 1)
    chosen = best.indices.masked_fill(best.values < 0, columns).sort(1).values
    found = torch.full((tokens, count), -1, dtype=torch.int32, device=scores.device)
    found[:, : chosen.shape[1]] = torch.where(chosen == columns, -1, chosen)
    return found
