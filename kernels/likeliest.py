"""The definition of greedy choice. Knows logits, no sampling."""

from __future__ import annotations

import torch


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """int64 [2, rows]: each row's first best token, and whether the row is finite."""
    return torch.stack([logits.argmax(1), logits.isfinite().all(1).long()])
