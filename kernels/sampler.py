"""Tokens drawn where logits are: which implementation a device has. Knows no parameters of requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TypeAlias

import torch
from torch import Tensor

from kernels.choose import missing_for
from kernels.reference.sampling import SamplingRows

Sample: TypeAlias = Callable[[Tensor, SamplingRows], Tensor]
"""As reference.sampling.sample."""


@functools.cache
def sampler_of(device: torch.device) -> Sample | None:
    """What draws on `device`; None where nothing does, and logits are to be brought to the host."""
    return None if missing_for("triton", str(device)) else _by_triton


def _by_triton(logits: Tensor, rows: SamplingRows) -> Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    import_module("kernels.triton.sampling").sample(logits, rows, tokens)
    return tokens
