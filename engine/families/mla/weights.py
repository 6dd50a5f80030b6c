"""Weights of V2, V3 and V3.2: what the forward reads, layer by layer. Knows shapes; reads and runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.operands import ExpertBank, GroupRouterSpec, IndexerSpec, IndexKeySpec, MlaLayer, MlaSpec, Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer. `input` fuses every projection of the normed hidden state, `query` those of its latent."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    input: Weights
    query_norm: torch.Tensor | None
    query: Weights | None  # None: queries are the first columns of `input`
    attention: MlaSpec
    index_key: IndexKeySpec | None
    indexer: IndexerSpec | None
    output: Weights
    router: GroupRouterSpec | None  # None: a dense layer, which is a bank of nothing but the shared expert
    experts: ExpertBank

    def whole(self, eps: float) -> MlaLayer:
        """The layer as one operand, for batches whose rows all attend absorbed and without a selection."""
        return MlaLayer(
            self.attention_norm, self.mlp_norm, eps, self.input, self.query_norm, self.query, self.attention,
            self.output, self.router, self.experts,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MtpBlock:
    """A multi-token prediction block: joins a hidden state with the next token's embedding, then one MoE layer."""

    embedding: torch.Tensor
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    join: Weights  # [hidden, 2 * hidden], the embedding first
    layer: Layer
    norm: torch.Tensor
    logits: Weights


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """The whole model. `mtp` is empty where the checkpoint carries none."""

    embedding: torch.Tensor  # [vocabulary, hidden] in the compute type
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    logits: Weights
    mtp: tuple[MtpBlock, ...]
