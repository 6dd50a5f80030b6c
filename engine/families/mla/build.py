"""Builds the operands of V2, V3 and V3.2 from a checkpoint's tensors. Knows names and shapes, runs nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.checkpoint.reader import Reader
from engine.families.kept import bank, matrices
from engine.families.mla.config import MlaConfig
from engine.families.mla.weights import Layer, MlaWeights, MtpBlock
from kernels import Ops
from kernels.operands import ExpertBank, GroupRouterSpec, IndexerSpec, IndexKeySpec, IndexMixing, MlaSpec, Weights

_NAMES = ("gate_proj", "up_proj", "down_proj")
LATENT_EPS = 1e-6  # of the norms inside attention, whatever the config says of the others


def build(
    reader: Reader, config: MlaConfig, ops: Ops, dtype: torch.dtype, expandable: bool,
    mixing: IndexMixing | None = None,
) -> MlaWeights:  # fmt: skip
    """Take every tensor of the model from `reader`; it refuses the ones left over.

    `expandable`: also keep the key-value projection whole, for the un-absorbed form. `mixing`: of index keys.
    """
    builder, layers = _Builder(reader, config, ops, dtype, expandable, mixing), len(config.dense)
    embedding, logits = builder.embedding("embed_tokens.weight"), builder.logits("lm_head.weight")
    weights = MlaWeights(
        embedding=embedding,
        layers=tuple(builder.layer(f"layers.{i}", dense) for i, dense in enumerate(config.dense)),
        norm=reader.floats("norm.weight", config.hidden),
        logits=logits,
        # transformers writes the key num_nextn_predict_layers without the block itself.
        mtp=tuple(
            builder.mtp(f"layers.{i}", embedding, logits)
            for i in range(layers, layers + config.mtp_layers)
            if reader.has(f"layers.{i}.")
        ),
    )
    reader.finish()
    return weights


@dataclass(frozen=True, slots=True)
class _Part:
    """A matrix of so many rows, and the order in which they are wanted; None: their own."""

    name: str
    rows: int
    order: list[int] | None = None

    @property
    def rows_in_order(self) -> list[int]:
        return self.order or list(range(self.rows))


def _rows(parts: Sequence[_Part]) -> int:
    return sum(part.rows for part in parts)


class _Builder:
    """Reads and packs one part after another, so that only one layer is held unpacked."""

    def __init__(
        self, reader: Reader, config: MlaConfig, ops: Ops, dtype: torch.dtype, expandable: bool,
        mixing: IndexMixing | None,
    ) -> None:  # fmt: skip
        self._reader, self._config, self._ops, self._dtype = reader, config, ops, dtype
        self._rounds, self._expandable, self._mixing = dtype == torch.bfloat16, expandable, mixing

    def packed(self, *weights: torch.Tensor) -> Weights:
        """Matrices [out, in] of one input, one below the other, as one product."""
        return self._ops.pack(torch.cat(weights)[None], self._rounds)

    def embedding(self, name: str) -> torch.Tensor:
        return self._reader.floats(name, self._config.vocab_size, self._config.hidden).to(self._dtype)

    def logits(self, name: str) -> Weights:
        return self.packed(self._reader.floats(name, self._config.vocab_size, self._config.hidden))

    def layer(self, prefix: str, dense: bool) -> Layer:
        c, read, attn = self._config, self._reader.floats, f"{prefix}.self_attn"
        fused, query, query_norm = self._queries(attn)
        column = _rows(fused)
        fused.append(_Part(f"{attn}.kv_a_proj_with_mqa.weight", c.latent_rank + c.rope))
        index_key, indexer = self._indexer(f"{attn}.indexer", fused, query)
        return Layer(
            attention_norm=read(f"{prefix}.input_layernorm.weight", c.hidden),
            mlp_norm=read(f"{prefix}.post_attention_layernorm.weight", c.hidden),
            input=self._product(fused, c.hidden),
            query_norm=query_norm,
            query=self._product(query, c.query_rank) if c.query_rank is not None else None,
            attention=self._attention(attn, column),
            index_key=index_key,
            indexer=indexer,
            output=self._product([_Part(f"{attn}.o_proj.weight", c.hidden)], c.heads * c.value),
            router=None if dense else self._router(f"{prefix}.mlp.gate"),
            experts=self._dense(f"{prefix}.mlp") if dense else self._experts(f"{prefix}.mlp"),
        )

    def mtp(self, prefix: str, embedding: torch.Tensor, logits: Weights) -> MtpBlock:
        """Its embedding and head repeat the model's, which stand in where the checkpoint leaves them out."""
        c, read = self._config, self._reader.floats
        own_embedding, own_head = f"{prefix}.embed_tokens.weight", f"{prefix}.shared_head.head.weight"
        return MtpBlock(
            embedding=self.embedding(own_embedding) if self._reader.has(own_embedding) else embedding,
            embedding_norm=read(f"{prefix}.enorm.weight", c.hidden),
            hidden_norm=read(f"{prefix}.hnorm.weight", c.hidden),
            join=self.packed(read(f"{prefix}.eh_proj.weight", c.hidden, 2 * c.hidden)),
            layer=self.layer(prefix, False),
            norm=read(f"{prefix}.shared_head.norm.weight", c.hidden),
            logits=self.logits(own_head) if self._reader.has(own_head) else logits,
        )

    def _product(self, parts: list[_Part], columns: int) -> Weights:
        """Matrices of one input, one below the other, as one product; kept as they are stored, where that can be."""
        order = None
        if any(part.order for part in parts):
            firsts = [_rows(parts[:number]) for number in range(len(parts))]
            order = [first + row for first, part in zip(firsts, parts, strict=True) for row in part.rows_in_order]
        stored = [(part.name, part.rows) for part in parts]
        kept = matrices(self._reader, self._ops, stored, columns, order)
        if kept is not None:
            return kept
        read = [self._reader.floats(part.name, part.rows, columns) for part in parts]
        ordered = [
            weight if part.order is None else weight[part.order] for part, weight in zip(parts, read, strict=True)
        ]
        return self.packed(*ordered)

    def _queries(self, attn: str) -> tuple[list[_Part], list[_Part], torch.Tensor | None]:
        """What the fused input projection begins with, what the query latent is multiplied with, and its norm."""
        c, outputs = self._config, self._config.heads * (self._config.nope + self._config.rope)
        if c.query_rank is None:
            return [_Part(f"{attn}.q_proj.weight", outputs, self._by_position())], [], None
        up = _Part(f"{attn}.q_b_proj.weight", outputs, self._by_position())
        norm = self._reader.floats(f"{attn}.q_a_layernorm.weight", c.query_rank)
        return [_Part(f"{attn}.q_a_proj.weight", c.query_rank)], [up], norm

    def _by_position(self) -> list[int]:
        """Rows head by head -> the heads' channels without position, then those with."""
        c = self._config
        rows = torch.arange(c.heads * (c.nope + c.rope)).view(c.heads, -1)
        return [*rows[:, : c.nope].flatten().tolist(), *rows[:, c.nope :].flatten().tolist()]

    def _attention(self, attn: str, column: int) -> MlaSpec:
        c, read = self._config, self._reader.floats
        both = read(f"{attn}.kv_b_proj.weight", c.heads * (c.nope + c.value), c.latent_rank)
        keys, values = both.view(c.heads, c.nope + c.value, c.latent_rank).split([c.nope, c.value], 1)
        return MlaSpec(
            heads=c.heads,
            nope=c.nope,
            rope=c.rope,
            value=c.value,
            rank=c.latent_rank,
            column=column,
            norm=read(f"{attn}.kv_a_layernorm.weight", c.latent_rank),
            norm_eps=LATENT_EPS,
            scale=c.rotary.score_factor / math.sqrt(c.nope + c.rope),
            absorb=self._ops.pack(keys.transpose(1, 2).contiguous(), self._rounds),
            output=self._ops.pack(values.contiguous(), self._rounds),
            expand=self.packed(both) if self._expandable else None,
        )

    def _indexer(
        self, prefix: str, fused: list[_Part], query: list[_Part]
    ) -> tuple[IndexKeySpec | None, IndexerSpec | None]:
        """Appends its projections to the fused input and to the queries."""
        c, read = self._config, self._reader.floats
        if c.index is None or c.query_rank is None:
            return None, None
        index, order = c.index, index_order(c.index.width, c.rope)
        query_column, column = _rows(query), _rows(fused)
        heads = [head * index.width + row for head in range(index.heads) for row in order]
        query.append(_Part(f"{prefix}.wq_b.weight", index.heads * index.width, heads))
        fused.append(_Part(f"{prefix}.wk.weight", index.width, order))
        fused.append(_Part(f"{prefix}.weights_proj.weight", index.heads))
        norm, bias = (read(f"{prefix}.k_norm.{part}", index.width)[order] for part in ("weight", "bias"))
        key = IndexKeySpec(column, norm, bias, LATENT_EPS, self._mixing)
        weights = column + index.width
        return key, IndexerSpec(query_column, weights, index.heads, index.width, index.topk, self._mixing)

    def _router(self, prefix: str) -> GroupRouterSpec:
        """Expert choice is computed in fp32 whatever the compute type is."""
        c, routing = self._config, self._config.routing
        gate = self._reader.floats(f"{prefix}.weight", c.experts, c.hidden)
        return GroupRouterSpec(
            gate=self._ops.pack(gate[None], False),
            bias=self._reader.floats(f"{prefix}.e_score_correction_bias", c.experts) if routing.sigmoid else None,
            experts=c.experts,
            topk=c.experts_per_token,
            groups=routing.groups,
            kept_groups=routing.kept_groups,
            group_best=2 if routing.sigmoid else 1,
            sigmoid=routing.sigmoid,
            normalize=routing.normalize,
            scaling=routing.scaling,
            always=c.shared_experts - 1,
        )

    def _dense(self, prefix: str) -> ExpertBank:
        c = self._config
        kept = bank(self._reader, self._ops, [], prefix, _NAMES, c.dense_inner, c.hidden, math.inf)
        return kept or self._bank([prefix], c.dense_inner, ())

    def _experts(self, prefix: str) -> ExpertBank:
        """A shared expert n times as wide is n experts that every row takes: the last, and `always` before it."""
        c, inner, read, shared = (
            self._config,
            self._config.expert_inner,
            self._reader.floats,
            f"{prefix}.shared_experts",
        )
        prefixes = [f"{prefix}.experts.{e}" for e in range(c.experts)]
        if c.shared_experts == 1:
            kept = bank(self._reader, self._ops, prefixes, shared, _NAMES, inner, c.hidden, math.inf)
            if kept is not None:
                return kept
        wide = inner * c.shared_experts
        gate, up = (read(f"{shared}.{name}_proj.weight", wide, c.hidden).split(inner) for name in ("gate", "up"))
        down = read(f"{shared}.down_proj.weight", c.hidden, wide).split(inner, 1)
        return self._bank(prefixes, inner, (gate, up, down))

    def _bank(self, prefixes: list[str], inner: int, shared: tuple[Sequence[torch.Tensor], ...]) -> ExpertBank:
        """`shared`: the last experts' gate, up and down matrices."""
        hidden, packed = self._config.hidden, []
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for (name, shape), last in zip(shapes.items(), shared or ((), (), ()), strict=True):
            names = [f"{prefix}.{name}_proj.weight" for prefix in prefixes]
            packed.append(self._ops.pack(self._reader.stack(names, *shape, then=last), self._rounds))
        return ExpertBank(*packed, len(prefixes) + len(shared[0] if shared else ()) - 1, inner, math.inf)


def index_order(width: int, rope: int) -> list[int]:
    """Where each channel of the indexer comes from: its rotary channels stand first and in two halves, the operators
    want them last and in pairs. Queries and keys are reordered alike, so no product changes.
    """
    return [*range(rope, width), *(half * (rope // 2) + pair for pair in range(rope // 2) for half in (0, 1))]
