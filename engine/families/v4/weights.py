"""V4's weights: upstream tensors gathered into the operands of the operators. Knows names and shapes, runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.checkpoint.reader import Reader
from engine.families.kept import bank, matrices
from engine.families.v4.config import LayerKind, V4Config
from kernels import Ops
from kernels.operands import (
    AttentionSpec,
    CompressorSpec,
    ExpertBank,
    HyperHead,
    HyperSite,
    IndexerSpec,
    IndexMixing,
    LatentSpec,
    RouterSpec,
    Weights,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer. `input` fuses every projection of the normed hidden state, `query` those of the latent."""

    kind: LayerKind
    attention_site: HyperSite
    mlp_site: HyperSite
    input: Weights
    latent: LatentSpec
    query: Weights
    compressor: CompressorSpec | None
    index_compressor: CompressorSpec | None
    indexer: IndexerSpec | None
    attention: AttentionSpec
    output_down: Weights  # one matrix per output group
    output_up: Weights
    router: RouterSpec
    experts: ExpertBank


@dataclass(frozen=True, slots=True)
class MtpBlock:
    """A multi-token prediction block: joins the streams with the next token's embedding, then one sliding layer."""

    embedding_in: Weights
    hidden_in: Weights
    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    layer: Layer
    head: HyperHead


@dataclass(frozen=True, slots=True)
class V4Weights:
    """The whole model. `mtp` is empty where the checkpoint carries none."""

    embedding: torch.Tensor  # [vocabulary, hidden] in the compute type
    layers: tuple[Layer, ...]
    head: HyperHead
    logits: Weights
    mtp: tuple[MtpBlock, ...]


def build(
    reader: Reader, config: V4Config, ops: Ops, dtype: torch.dtype, mixing: IndexMixing | None = None
) -> V4Weights:
    """Take every tensor of the model from `reader`; it refuses the ones left over. `mixing`: of index keys' records."""
    builder = _Builder(reader, config, ops, dtype == torch.bfloat16, mixing)
    weights = V4Weights(
        embedding=reader.floats("embed.weight", config.vocab_size, config.hidden).to(dtype),
        layers=tuple(builder.layer(f"layers.{i}", kind, config.hashed[i]) for i, kind in enumerate(config.layers)),
        head=builder.head("hc_head", "norm.weight"),
        logits=builder.packed(reader.floats("head.weight", config.vocab_size, config.hidden)),
        # transformers writes the key num_nextn_predict_layers without the block itself.
        mtp=tuple(builder.mtp(f"mtp.{i}") for i in range(config.mtp_layers if reader.has("mtp.") else 0)),
    )
    reader.finish()
    return weights


class _Builder:
    """Reads and packs one part after another, so that only one layer is held unpacked."""

    def __init__(
        self, reader: Reader, config: V4Config, ops: Ops, rounds: bool, mixing: IndexMixing | None
    ) -> None:  # fmt: skip
        self._reader, self._config, self._ops, self._rounds = reader, config, ops, rounds
        self._mixing = mixing

    def packed(self, *weights: torch.Tensor) -> Weights:
        """Matrices [out, in] of one input, one below the other, as one product."""
        return self._ops.pack(torch.cat(weights)[None], self._rounds)

    def layer(self, prefix: str, kind: LayerKind, hashed: bool) -> Layer:
        c, read, attn = self._config, self._reader.floats, f"{prefix}.attn"
        fused = [
            read(f"{attn}.wq_a.weight", c.query_rank, c.hidden),
            read(f"{attn}.wkv.weight", c.head_dim, c.hidden),
        ]
        queries = [(f"{attn}.wq_b.weight", c.heads * c.head_dim)]
        compressor = index_compressor = indexer = None
        if kind is not LayerKind.SLIDING:
            overlap = kind is LayerKind.CSA
            compressor = self._compressor(f"{attn}.compressor", c.rate(kind), c.head_dim, overlap, fused)
        if kind is LayerKind.CSA:
            index = f"{attn}.indexer"
            index_compressor = self._compressor(f"{index}.compressor", c.csa_rate, c.index_dim, True, fused)
            index_compressor = replace(index_compressor, mixing=self._mixing)
            fused.append(read(f"{index}.weights_proj.weight", c.index_heads, c.hidden))
            queries.append((f"{index}.wq_b.weight", c.index_heads * c.index_dim))
            at = sum(map(len, fused)) - c.index_heads
            indexer = IndexerSpec(c.heads * c.head_dim, at, c.index_heads, c.index_dim, c.index_topk, self._mixing)
        return Layer(
            kind=kind,
            attention_site=self._site(f"{prefix}.hc_attn", f"{prefix}.attn_norm.weight"),
            mlp_site=self._site(f"{prefix}.hc_ffn", f"{prefix}.ffn_norm.weight"),
            input=self.packed(*fused),
            latent=LatentSpec(
                read(f"{attn}.q_norm.weight", c.query_rank), read(f"{attn}.kv_norm.weight", c.head_dim), c.norm_eps
            ),
            query=self._product(queries, c.query_rank),
            compressor=compressor,
            index_compressor=index_compressor,
            indexer=indexer,
            attention=AttentionSpec(c.heads, c.head_dim, c.window, read(f"{attn}.attn_sink", c.heads), c.norm_eps),
            output_down=self._output_down(f"{attn}.wo_a.weight"),
            output_up=self._product([(f"{attn}.wo_b.weight", c.hidden)], c.output_groups * c.output_rank),
            router=self._router(f"{prefix}.ffn.gate", hashed),
            experts=self._experts(f"{prefix}.ffn"),
        )

    def _product(self, parts: list[tuple[str, int]], columns: int) -> Weights:
        """Matrices (name, rows) of one input as one product; kept as they are stored, where that can be."""
        kept = matrices(self._reader, self._ops, parts, columns)
        return kept or self.packed(*(self._reader.floats(name, rows, columns) for name, rows in parts))

    def _output_down(self, name: str) -> Weights:
        """One matrix per output group."""
        c, rows = self._config, self._config.output_groups * self._config.output_rank
        inner = c.heads * c.head_dim // c.output_groups
        kept = matrices(self._reader, self._ops, [(name, rows)], inner, groups=c.output_groups)
        if kept is not None:
            return kept
        down = self._reader.floats(name, rows, inner)
        return self._ops.pack(down.view(c.output_groups, c.output_rank, inner), self._rounds)

    def head(self, prefix: str, norm: str) -> HyperHead:
        c, read = self._config, self._reader.floats
        return HyperHead(
            mix=self._ops.pack(read(f"{prefix}_fn", c.streams, c.streams * c.hidden)[None], False),
            base=read(f"{prefix}_base", c.streams),
            scale=read(f"{prefix}_scale", 1),
            norm=read(norm, c.hidden),
            streams=c.streams,
            hyper_eps=c.hyper_eps,
            norm_eps=c.norm_eps,
        )

    def mtp(self, prefix: str) -> MtpBlock:
        c, read = self._config, self._reader.floats
        return MtpBlock(
            embedding_in=self.packed(read(f"{prefix}.e_proj.weight", c.hidden, c.hidden)),
            hidden_in=self.packed(read(f"{prefix}.h_proj.weight", c.hidden, c.hidden)),
            embedding_norm=read(f"{prefix}.enorm.weight", c.hidden),
            hidden_norm=read(f"{prefix}.hnorm.weight", c.hidden),
            layer=self.layer(prefix, LayerKind.SLIDING, False),
            head=self.head(f"{prefix}.hc_head", f"{prefix}.norm.weight"),
        )

    def _site(self, prefix: str, norm: str) -> HyperSite:
        """Coefficients are computed in fp32 whatever the compute type is."""
        c, read = self._config, self._reader.floats
        outputs = (2 + c.streams) * c.streams
        return HyperSite(
            mix=self._ops.pack(read(f"{prefix}_fn", outputs, c.streams * c.hidden)[None], False),
            base=read(f"{prefix}_base", outputs),
            scale=read(f"{prefix}_scale", 3),
            norm=read(norm, c.hidden),
            streams=c.streams,
            iterations=c.sinkhorn_iterations,
            hyper_eps=c.hyper_eps,
            norm_eps=c.norm_eps,
        )

    def _compressor(
        self, prefix: str, rate: int, width: int, overlap: bool, fused: list[torch.Tensor]
    ) -> CompressorSpec:
        """Appends its two projections to the fused input."""
        c, read, outputs = self._config, self._reader.floats, width * (2 if overlap else 1)
        column = sum(map(len, fused))
        fused.append(read(f"{prefix}.wkv.weight", outputs, c.hidden))
        fused.append(read(f"{prefix}.wgate.weight", outputs, c.hidden))
        bias, norm = read(f"{prefix}.ape", rate, outputs), read(f"{prefix}.norm.weight", width)
        return CompressorSpec(column, rate, width, overlap, bias, norm, c.norm_eps)

    def _router(self, prefix: str, hashed: bool) -> RouterSpec:
        c, k = self._config, self._config.experts_per_token
        gate = self.packed(self._reader.floats(f"{prefix}.weight", c.experts, c.hidden))
        if hashed:
            table = self._reader.integers(f"{prefix}.tid2eid", c.vocab_size, k, below=c.experts)
            return RouterSpec(gate, None, table, c.experts, k, c.routed_scaling)
        return RouterSpec(gate, self._reader.floats(f"{prefix}.bias", c.experts), None, c.experts, k, c.routed_scaling)

    def _experts(self, prefix: str) -> ExpertBank:
        c = self._config
        routed, shared = [f"{prefix}.experts.{e}" for e in range(c.experts)], f"{prefix}.shared_experts"
        kept = bank(
            self._reader, self._ops, routed, shared, ("w1", "w3", "w2"), c.expert_inner, c.hidden, c.swiglu_limit
        )
        if kept is not None:
            return kept
        names = [*routed, shared]

        def stacked(part: str, *shape: int) -> Weights:
            matrices = self._reader.stack([f"{name}.{part}.weight" for name in names], *shape)
            return self._ops.pack(matrices, self._rounds)

        gate, up = stacked("w1", c.expert_inner, c.hidden), stacked("w3", c.expert_inner, c.hidden)
        down = stacked("w2", c.hidden, c.expert_inner)
        return ExpertBank(gate, up, down, c.experts, c.expert_inner, c.swiglu_limit)
