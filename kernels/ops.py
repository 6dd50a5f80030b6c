"""The operator record: every function the engine may call on tensors. Knows no implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kernels.likeliest import likeliest
from kernels.operands import (
    CPU,
    AttentionSpec,
    CompressorSpec,
    ExpertBank,
    GroupRouterSpec,
    HyperHead,
    HyperSite,
    IndexerSpec,
    IndexKeySpec,
    LatentSpec,
    MlaLayer,
    MlaSpec,
    Pages,
    Ragged,
    Ring,
    RopeTable,
    RouterSpec,
    Selection,
    Weights,
)

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every operator. Activations are fp32 and contiguous; shapes stand in the reference modules.

    `batch_invariant` is true when no row's bits depend on the batch, the chunk or the place in which it is computed.
    """

    name: str
    batch_invariant: bool
    begin: Callable[[], object]  # called by the thread that is about to use the operators
    pack: Callable[[Tensor, bool], Weights]  # [groups, out, in], rounds to bf16 -> storage this backend multiplies from
    linear: Callable[[Tensor, Weights], Tensor]
    hyper_pre: Callable[[Tensor, HyperSite], tuple[Tensor, Tensor, Tensor]]
    hyper_post: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    hyper_head: Callable[[Tensor, HyperHead], Tensor]
    latent: Callable[[Tensor, LatentSpec, Ragged, RopeTable, torch.dtype], tuple[Tensor, Tensor]]
    compress: Callable[[Tensor, CompressorSpec, Ragged, Ring, Pages, RopeTable], None]
    index_topk: Callable[[Tensor, Tensor, IndexerSpec, Ragged, Pages, RopeTable], Selection]
    attend: Callable[[Tensor, Tensor, AttentionSpec, Ragged, Ring, Pages | None, Selection | None, RopeTable], Tensor]
    store_rows: Callable[[Tensor, int, Ragged, Ring], None]
    route: Callable[[Tensor, Tensor, RouterSpec], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor, ExpertBank], Tensor]
    norm: Callable[[Tensor, Tensor, float], Tensor]
    store_latent: Callable[[Tensor, MlaSpec, Ragged, Pages, RopeTable], None]
    store_index_key: Callable[[Tensor, IndexKeySpec, Ragged, Pages, RopeTable], None]
    attend_latent: Callable[[Tensor, Tensor, MlaSpec, Ragged, Pages, Selection | None, RopeTable], Tensor]
    read_rows: Callable[[int, Ragged, Pages, int], Tensor]
    attend_expanded: Callable[[Tensor, Tensor, Tensor, MlaSpec, range, Tensor | None, RopeTable], Tensor]
    route_groups: Callable[[Tensor, GroupRouterSpec], tuple[Tensor, Tensor]]
    mla_layer: Callable[[Tensor, MlaLayer, Ragged, Pages, RopeTable], Tensor]
    # Fp8Weights or Fp4Weights (reference/gemm.py) and the order of their outputs -> storage this backend multiplies
    # from; None: weights are to be dequantized and packed.
    keep: Callable[[Any, Tensor | None], Weights] | None = None
    # By rank, rotated channels and type of cached latents: whether long chunks are faster un-absorbed.
    expands: Callable[[int, int, torch.dtype], bool] = lambda _rank, _rope, _dtype: True
    # Logits fp32 [rows, vocabulary] -> int64 [2, rows], as kernels/likeliest.py says.
    likeliest: Callable[[Tensor], Tensor] = likeliest
    # Chains of the above where a backend has its own way, else None: `linear` of a `norm`, and what follows attention
    # in a layer, x [rows, hidden] plus what attention gave, and the experts of that sum's norm added to it.
    norm_linear: Callable[[Tensor, Tensor, float, Weights], Tensor] | None = None
    after_attention: Callable[[Tensor, Tensor, MlaLayer], Tensor] | None = None
    apart: bool = False  # whether rows that products and attention are given may stand apart
    records: bool = False  # whether families are to cache published records, which these operators then read and write
    captures: bool = False  # whether a decode step of these waits for nothing, so that a CUDA graph can hold it
    device: torch.device = CPU  # where weights, caches and activations are
