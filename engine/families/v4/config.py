"""V4's configuration from either set of keys, upstream's or transformers', checked field by field. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.families.fields import MOST_EXPERTS, MOST_LAYERS, MOST_TIMES, Fields, is_integer, refusal, rope_of
from engine.families.yarn import Rope

MECHANISMS: dict[str, tuple[object, ...]] = {  # of every published V4 and V4.1; another value would need other code
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
}

SWITCHES = ("fake_quantize",)  # of the section `serving`; their meaning is in `options`
_MOST_RATE = 1 << 16  # tokens of one entry; a published one has 128


class LayerKind(Enum):
    """How a layer sees what its window does not hold; the value is transformers' name."""

    SLIDING = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


@dataclass(frozen=True, slots=True)
class V4Config:
    """Everything the forward needs to know, under this project's names."""

    vocab_size: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    experts: int
    experts_per_token: int
    expert_inner: int
    routed_scaling: float
    swiglu_limit: float
    streams: int
    sinkhorn_iterations: int
    hyper_eps: float
    norm_eps: float
    layers: tuple[LayerKind, ...]
    hashed: tuple[bool, ...]
    csa_rate: int
    hca_rate: int
    main_rope: Rope
    compress_rope: Rope
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    mtp_layers: int

    def rate(self, kind: LayerKind) -> int:
        """Tokens per compressed entry; 0 for a layer that compresses nothing."""
        return {LayerKind.SLIDING: 0, LayerKind.CSA: self.csa_rate, LayerKind.HCA: self.hca_rate}[kind]

    @property
    def rates(self) -> tuple[int, ...]:
        """The compress rates in use, ascending."""
        return tuple(sorted({self.rate(kind) for kind in self.layers} - {0}))


def parse(config: dict[str, Any]) -> V4Config:
    """Raises CheckpointError naming the key for anything missing, of the wrong kind, or not V4."""
    fields = Fields(config)
    count, number = fields.count, fields.number
    fields.expect(MECHANISMS)
    layers, (csa_rate, hca_rate) = _layers(fields, count("num_hidden_layers", MOST_LAYERS)), _rates(fields)
    parsed = V4Config(
        vocab_size=count("vocab_size"),
        hidden=count("hidden_size"),
        heads=count("num_attention_heads"),
        head_dim=count("head_dim"),
        rope_dim=_rope_dim(fields, count("head_dim")),
        query_rank=count("q_lora_rank"),
        output_groups=count("o_groups"),
        output_rank=count("o_lora_rank"),
        window=count("sliding_window"),
        index_heads=count("index_n_heads"),
        index_dim=count("index_head_dim"),
        index_topk=count("index_topk"),
        experts=count("n_routed_experts", MOST_EXPERTS),
        experts_per_token=count("num_experts_per_tok"),
        expert_inner=count("moe_intermediate_size"),
        routed_scaling=number("routed_scaling_factor", 1.5),
        swiglu_limit=number("swiglu_limit", 10.0),
        streams=count("hc_mult", MOST_TIMES),
        sinkhorn_iterations=count("hc_sinkhorn_iters", MOST_TIMES),
        hyper_eps=number("hc_eps", 1e-6),
        norm_eps=number("rms_norm_eps", 1e-6),
        layers=layers,
        hashed=_hashed(fields, len(layers)),
        csa_rate=csa_rate,
        hca_rate=hca_rate,
        main_rope=_rope(fields, "main"),
        compress_rope=_rope(fields, "compress"),
        max_context_tokens=count("max_position_embeddings"),
        eos_token_ids=fields.tokens("eos_token_id", 1),
        mtp_layers=fields.count_or_zero("num_nextn_predict_layers", "num_mtp_layers", most=MOST_LAYERS),
    )
    _check(parsed)
    return parsed


def _layers(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    """`layer_types` if given, else `compress_ratios` (which also lists the MTP layers, after the others)."""
    named = fields.kinds("layer_types", count, tuple(kind.value for kind in LayerKind))
    if named is not None:
        return tuple(map(LayerKind, named))
    ratios = fields.values.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < count:
        found = len(ratios) if isinstance(ratios, list) else repr(ratios)
        raise refusal("compress_ratios", f"{found} entries for {count} layers", "list one ratio per layer")
    csa_rate, hca_rate = _rates(fields)
    by_ratio = {0: LayerKind.SLIDING, csa_rate: LayerKind.CSA, hca_rate: LayerKind.HCA}
    if unknown := {repr(r) for r in ratios[:count] if not is_integer(r) or r not in by_ratio}:
        raise refusal("compress_ratios", f"{', '.join(sorted(unknown))} unknown", f"use 0, {csa_rate} or {hca_rate}")
    return tuple(by_ratio[ratio] for ratio in ratios[:count])


def _rates(fields: Fields) -> tuple[int, int]:
    given = fields.section("compress_rates")
    csa, hca = given.get(LayerKind.CSA.value, 4), given.get(LayerKind.HCA.value, 128)
    for rate in (csa, hca):
        if not is_integer(rate) or not 2 <= rate <= _MOST_RATE:
            raise refusal("compress_rates", f"{rate!r} is not a rate", f"use integers in 2 .. {_MOST_RATE}")
    if csa == hca:
        raise refusal("compress_rates", "both rates are equal", "give the two layer types different rates")
    return csa, hca


def _hashed(fields: Fields, count: int) -> tuple[bool, ...]:
    named = fields.kinds("mlp_layer_types", count, ("hash_moe", "moe"))
    if named is not None:
        return tuple(name == "hash_moe" for name in named)
    hashed = fields.whole("num_hash_layers", -1, below=count + 1)
    return tuple(layer < hashed for layer in range(count))


def _rope_dim(fields: Fields, head_dim: int) -> int:
    key = "qk_rope_head_dim"
    width = fields.values.get(key)
    if width is None:
        main = Fields(fields.section("rope_parameters")).section("main")
        given = fields.values.get("partial_rotary_factor") or main.get("partial_rotary_factor")
        factor = Fields({"partial_rotary_factor": given}).number("partial_rotary_factor") if given else 0.0
        width = int(head_dim * factor)
    if not is_integer(width) or width < 2 or width % 2 or width > head_dim:
        raise refusal(key, f"{width!r} does not fit head_dim {head_dim}", "give an even width within it")
    return int(width)


def _rope(fields: Fields, table: str) -> Rope:
    """The scaling block applies to the compress table alone; each table has its own theta."""
    key = {"main": "rope_theta", "compress": "compress_rope_theta"}[table]
    theta = fields.values.get(key, {"main": 1e4, "compress": 1.6e5}[table])
    given = fields.section("rope_parameters")
    nested, scaling = given.get(table), {}
    if isinstance(nested, dict):
        scaling, theta = nested, nested.get("rope_theta", theta)
    elif table == "compress":
        scaling = fields.section("rope_scaling") or given
    return rope_of(Fields({key: theta}).base(key), scaling, "rope_scaling")


def _check(config: V4Config) -> None:
    """Relations between fields."""
    if config.heads % config.output_groups:
        raise refusal("o_groups", f"{config.output_groups} does not divide {config.heads} heads", "restore config.json")
    if config.index_dim < config.rope_dim:
        raise refusal("index_head_dim", f"narrower than the rotary part ({config.rope_dim})", "restore config.json")
    if config.experts_per_token > config.experts:
        raise refusal("num_experts_per_tok", f"more than the {config.experts} experts", "restore config.json")
