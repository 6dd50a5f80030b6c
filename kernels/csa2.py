"""Operators that V4.1 alone needs: one record per backend, and their operands. Knows implementations by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias

import numpy as np
import torch

from kernels.operands import HyperSite, Pages, Ragged, Ring, RopeTable, Selection
from kernels.reference.engram import hash_rows

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Columns `column ..` of the fused projection hold `content [width]` and, for rates above 1, `gate [width]`."""

    column: int
    rate: int
    width: int
    norm: Tensor  # [width] fp32
    norm_eps: float


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """One choice of entries. With `blocks`, also of candidate blocks of `block_entries` entries each."""

    heads: int
    width: int
    topk: int
    blocks: int  # 0: none are proposed
    block_entries: int


@dataclass(frozen=True, slots=True)
class EngramSpec:
    """Gate of the n-gram memory, per residual stream."""

    query_norm: Tensor  # [streams, hidden] fp32
    key_norm: Tensor  # [streams, hidden] fp32
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Csa2Ops:
    """One implementation of every operator. Activations are fp32 and contiguous; shapes stand in reference/csa2.py."""

    hyper_mix: Callable[[Tensor, HyperSite], tuple[Tensor, Tensor, Tensor]]
    hyper_collapse: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    pool: Callable[[Tensor, PoolSpec, Ragged, Ring | None], Tensor]
    norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate_heads: Callable[[Tensor, int, np.ndarray | Tensor, RopeTable], Tensor]
    store_entries: Callable[[Tensor, Ragged, Pages], None]
    choose: Callable[[Tensor, Tensor, ChoiceSpec, Ragged, Pages, Selection | None], tuple[Selection, Selection | None]]
    engram: Callable[[Tensor, Tensor, Tensor, EngramSpec], Tensor]
    # As reference/engram.py: what names rows of the memory, and, where it has its own way, what reads them.
    hash_rows: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor] = hash_rows
    gather: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


def csa2_ops(backend: str) -> Csa2Ops:
    """The operators of the backend that `Ops.name` names."""
    ops: Csa2Ops = import_module(f"kernels.{backend}.csa2").OPS
    return ops
