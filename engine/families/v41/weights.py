"""V4.1's weights: upstream tensors gathered into the operators' operands. Knows names and shapes, runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.checkpoint.reader import Reader
from engine.checkpoint.table import RowTable
from engine.families.kept import bank, matrices
from engine.families.v41.config import EngramConfig, V41Config
from engine.families.v41.schedule import Role
from kernels import Ops
from kernels.csa2 import ChoiceSpec, EngramSpec, PoolSpec
from kernels.operands import AttentionSpec, ExpertBank, HyperSite, LatentSpec, RouterSpec, Weights

ELSEWHERE = ("vision.", "aligner.", "image_", "mtp.")  # the vision tower's tensors and the draft's


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """One layer's n-gram memory. `project` maps the rows of a token to a key per stream and one value."""

    place: int  # among the layers that have one
    table: RowTable
    project: Weights
    gate: EngramSpec


@dataclass(frozen=True, slots=True)
class SourceWeights:
    """What an entry source adds: how its entries are pooled, and their index keys."""

    pool: PoolSpec
    key: Weights  # [index_dim, head_dim], from the latent
    key_norm: torch.Tensor  # [index_dim] fp32


@dataclass(frozen=True, slots=True)
class ChooserWeights:
    """What a layer that chooses entries adds; `weight_column` is where its head weights stand in the projection."""

    query: Weights  # [index_heads * index_dim, query_rank]
    weight_column: int
    choice: ChoiceSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer. `input` fuses every projection of the normed hidden state."""

    role: Role
    engram: EngramWeights | None
    attention_site: HyperSite
    mlp_site: HyperSite
    input: Weights
    latent: LatentSpec
    query: Weights
    source: SourceWeights | None
    chooser: ChooserWeights | None
    attention: AttentionSpec
    output_down: Weights  # one matrix per output group
    output_up: Weights
    router: RouterSpec
    image_router: RouterSpec
    experts: ExpertBank


@dataclass(frozen=True, slots=True)
class V41Weights:
    """The text model."""

    embedding: torch.Tensor  # [vocabulary, hidden] in the compute type
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [hidden] fp32
    logits: Weights


def build(reader: Reader, config: V41Config, ops: Ops, dtype: torch.dtype) -> V41Weights:
    """Take every tensor of the text model from `reader`; it refuses the ones left over."""
    builder = _Builder(reader, config, ops, dtype == torch.bfloat16)
    weights = V41Weights(
        embedding=reader.floats("embed.weight", config.vocab_size, config.hidden).to(dtype),
        layers=tuple(builder.layer(i, role) for i, role in enumerate(config.schedule.roles)),
        norm=reader.floats("norm.weight", config.hidden),
        logits=builder.packed(reader.floats("head.weight", config.vocab_size, config.hidden)),
    )
    reader.leave(*ELSEWHERE)
    reader.finish()
    return weights


class _Builder:
    """Reads and packs one part after another, so that only one layer is held unpacked."""

    def __init__(self, reader: Reader, config: V41Config, ops: Ops, rounds: bool) -> None:
        self._reader, self._config, self._ops, self._rounds = reader, config, ops, rounds

    def packed(self, *weights: torch.Tensor) -> Weights:
        """Matrices [out, in] of one input, one below the other, as one product."""
        return self._ops.pack(torch.cat(weights)[None], self._rounds)

    def _product(self, name: str, rows: int, columns: int) -> Weights:
        """One matrix, kept as it is stored where that can be."""
        kept = matrices(self._reader, self._ops, [(name, rows)], columns)
        return kept or self.packed(self._reader.floats(name, rows, columns))

    def layer(self, index: int, role: Role) -> Layer:
        c, read, prefix = self._config, self._reader.floats, f"layers.{index}"
        attn, engram = f"{prefix}.attn", c.engram
        fused = [
            read(f"{attn}.wq_a.weight", c.query_rank, c.hidden),
            read(f"{attn}.wkv.weight", c.head_dim, c.hidden),
        ]
        source = self._source(attn, role.ratio, fused) if role.source == index else None
        chooser = self._chooser(f"{attn}.indexer", role, fused) if role.ratio and role.chooser == index else None
        latent = LatentSpec(
            read(f"{attn}.q_norm.weight", c.query_rank), read(f"{attn}.kv_norm.weight", c.head_dim), c.norm_eps
        )
        router, image_router = self._routers(f"{prefix}.ffn.gate")
        return Layer(
            role=role,
            engram=self._engram(f"{prefix}.engram", index, engram) if engram and index in engram.layers else None,
            attention_site=self._site(f"{prefix}.hc_attn", f"{prefix}.attn_norm.weight"),
            mlp_site=self._site(f"{prefix}.hc_ffn", f"{prefix}.ffn_norm.weight"),
            input=self.packed(*fused),
            latent=latent,
            query=self._product(f"{attn}.wq_b.weight", c.heads * c.head_dim, c.query_rank),
            source=source,
            chooser=chooser,
            attention=AttentionSpec(c.heads, c.head_dim, c.window, read(f"{attn}.attn_sink", c.heads), None),
            output_down=self._output_down(f"{attn}.wo_a.weight"),
            output_up=self._product(f"{attn}.wo_b.weight", c.hidden, c.output_groups * c.output_rank),
            router=router,
            image_router=image_router,
            experts=self._experts(f"{prefix}.ffn"),
        )

    def _source(self, attn: str, ratio: int, fused: list[torch.Tensor]) -> SourceWeights:
        """Appends the projections of an entry source to the fused input."""
        c, read, prefix = self._config, self._reader.floats, f"{attn}.compressor"
        column = sum(map(len, fused))
        for part in ("wkv", "wgate") if ratio > 1 else ("wkv",):
            fused.append(read(f"{prefix}.{part}.weight", c.head_dim, c.hidden))
        return SourceWeights(
            pool=PoolSpec(column, ratio, c.head_dim, read(f"{prefix}.norm.weight", c.head_dim), c.norm_eps),
            key=self.packed(read(f"{attn}.indexer.wk.weight", c.index_dim, c.head_dim)),
            key_norm=read(f"{attn}.indexer.k_norm.weight", c.index_dim),
        )

    def _chooser(self, prefix: str, role: Role, fused: list[torch.Tensor]) -> ChooserWeights:
        """Appends the head weights of a choosing layer to the fused input."""
        c, read = self._config, self._reader.floats
        column = sum(map(len, fused))
        fused.append(read(f"{prefix}.weights_proj.weight", c.index_heads, c.hidden))
        proposed = c.candidate_blocks if role.proposes else 0
        return ChooserWeights(
            query=self._product(f"{prefix}.wq_b.weight", c.index_heads * c.index_dim, c.query_rank),
            weight_column=column,
            choice=ChoiceSpec(c.index_heads, c.index_dim, c.index_topk, proposed, c.candidate_block_entries),
        )

    def _engram(self, prefix: str, index: int, engram: EngramConfig) -> EngramWeights:
        c, read = self._config, self._reader.floats
        place = engram.layers.index(index)
        outputs = (c.streams + 1) * c.hidden
        return EngramWeights(
            place=place,
            table=self._reader.table(f"{prefix}.embed.weight", engram.rows[place], engram.width),
            project=self.packed(read(f"{prefix}.wkv.weight", outputs, engram.columns * engram.width)),
            gate=EngramSpec(
                read(f"{prefix}.q_weight", c.streams, c.hidden),
                read(f"{prefix}.k_weight", c.streams, c.hidden),
                c.norm_eps,
            ),
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

    def _output_down(self, name: str) -> Weights:
        c = self._config
        inner = c.heads * c.head_dim // c.output_groups
        rows = c.output_groups * c.output_rank
        kept = matrices(self._reader, self._ops, [(name, rows)], inner, groups=c.output_groups)
        if kept is not None:
            return kept
        down = self._reader.floats(name, rows, inner)
        return self._ops.pack(down.view(c.output_groups, c.output_rank, inner), self._rounds)

    def _routers(self, prefix: str) -> tuple[RouterSpec, RouterSpec]:
        """For text and for image positions: they differ in the bias of the choice."""
        c, read = self._config, self._reader.floats
        gate = self.packed(read(f"{prefix}.weight", c.experts, c.hidden) / c.gate_temperature)
        bias = read(f"{prefix}.bias", c.experts)
        text = RouterSpec(gate, bias, None, c.experts, c.experts_per_token, c.routed_scaling)
        return text, replace(text, bias=read(f"{prefix}.bias_vl", c.experts))

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
