"""The configuration of V2, V3 and V3.2 from either set of keys, checked field by field. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.families.fields import MOST_EXPERTS, MOST_LAYERS, MOST_TIMES, Fields, refusal
from engine.families.mla.scaling import Rotary, rotary

SWITCHES = ("fp8_index_scores",)  # of the section `serving`; their meaning is in `options`
_SIGMOID = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}
_SOFTMAX = {"topk_method": ("greedy", "group_limited_greedy"), "scoring_func": ("softmax",), "norm_topk_prob": (False,)}
_SAME = {  # mechanisms that every published model has; another value would need other code
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "moe_layer_freq": (1,),
}


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen (see kernels.operands.GroupRouterSpec)."""

    sigmoid: bool
    groups: int
    kept_groups: int
    normalize: bool
    scaling: float


@dataclass(frozen=True, slots=True)
class Indexing:
    """V3.2's lightning indexer."""

    heads: int
    width: int
    topk: int


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Everything the forward needs to know, under this project's names."""

    model_type: str
    vocab_size: int
    hidden: int
    heads: int
    query_rank: int | None  # None: queries are projected from the hidden state directly
    latent_rank: int
    nope: int
    rope: int
    value: int
    dense: tuple[bool, ...]  # by layer: one wide MLP instead of experts
    dense_inner: int
    expert_inner: int
    experts: int
    shared_experts: int
    experts_per_token: int
    routing: Routing
    norm_eps: float
    rotary: Rotary
    index: Indexing | None
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    mtp_layers: int


def parse(config: dict[str, Any]) -> MlaConfig:
    """Raises CheckpointError naming the key for anything missing, of the wrong kind, or of another family."""
    fields, model_type = Fields(config), model_type_of(config)
    fields.expect({**_SAME, **(_SOFTMAX if model_type == "deepseek_v2" else _SIGMOID)})
    count, layers = fields.count, fields.count("num_hidden_layers", MOST_LAYERS)
    parsed = MlaConfig(
        model_type=model_type,
        vocab_size=count("vocab_size"),
        hidden=count("hidden_size"),
        heads=count("num_attention_heads"),
        query_rank=None if config.get("q_lora_rank") is None else count("q_lora_rank"),
        latent_rank=count("kv_lora_rank"),
        nope=count("qk_nope_head_dim"),
        rope=count("qk_rope_head_dim"),
        value=count("v_head_dim"),
        dense=_dense(fields, layers),
        dense_inner=count("intermediate_size"),
        expert_inner=count("moe_intermediate_size"),
        experts=count("n_routed_experts", MOST_EXPERTS),
        shared_experts=count("n_shared_experts", MOST_TIMES),
        experts_per_token=count("num_experts_per_tok"),
        routing=_routing(fields, model_type),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rotary=rotary(config),
        index=_indexing(fields, layers) if model_type == "deepseek_v32" else None,
        max_context_tokens=count("max_position_embeddings"),
        eos_token_ids=fields.tokens("eos_token_id"),
        mtp_layers=fields.count_or_zero("num_nextn_predict_layers", "num_mtp_layers", most=MOST_LAYERS),
    )
    _check(parsed, config)
    return parsed


def model_type_of(config: dict[str, Any]) -> str:
    """Which of the three models this is: by `model_type`, else by the architecture's name."""
    named = [str(config.get("model_type"))]
    named += [name.removesuffix("ForCausalLM").replace("Deepseek", "deepseek_").lower() for name in _listed(config)]
    known = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
    for name in named:
        if name in known:
            return name
    raise refusal("model_type", f"{config.get('model_type')!r} is none of {', '.join(known)}", "restore config.json")


def _listed(config: dict[str, Any]) -> list[str]:
    listed = config.get("architectures")
    return [str(name) for name in listed] if isinstance(listed, list) else []


def _dense(fields: Fields, layers: int) -> tuple[bool, ...]:
    """`mlp_layer_types` if given, else the first `first_k_dense_replace` layers."""
    kinds = fields.kinds("mlp_layer_types", layers, ("dense", "sparse"))
    if kinds is not None:
        return tuple(kind == "dense" for kind in kinds)
    first = fields.count_or_zero("first_k_dense_replace")
    if first > layers:
        raise refusal("first_k_dense_replace", f"{first} of {layers} layers", "restore config.json")
    return tuple(layer < first for layer in range(layers))


def _routing(fields: Fields, model_type: str) -> Routing:
    scaling = fields.number("routed_scaling_factor", 1.0 if model_type == "deepseek_v2" else 2.5)
    if model_type != "deepseek_v2":
        groups, kept = fields.count("n_group"), fields.count("topk_group")
        return Routing(True, groups, kept, fields.flag("norm_topk_prob", True), scaling)
    if fields.values.get("topk_method", "greedy") == "greedy":
        return Routing(False, 1, 1, False, scaling)
    return Routing(False, fields.count("n_group"), fields.count("topk_group"), False, scaling)


def _indexing(fields: Fields, layers: int) -> Indexing:
    fields.kinds("layer_types", layers, ("indexed_attention",))
    return Indexing(fields.count("index_n_heads"), fields.count("index_head_dim"), fields.count("index_topk"))


def _check(config: MlaConfig, given: dict[str, Any]) -> None:
    """Relations between fields."""
    if given.get("num_key_value_heads", config.heads) not in (None, config.heads):
        message = f"{given['num_key_value_heads']!r} differs from num_attention_heads {config.heads}"
        raise refusal("num_key_value_heads", message, "give both the same value")
    if config.rope % 2:
        raise refusal("qk_rope_head_dim", f"{config.rope} is odd", "restore config.json")
    routing, size = config.routing, config.experts // config.routing.groups
    if config.experts % routing.groups or size < (2 if routing.sigmoid else 1):
        raise refusal("n_group", f"{config.experts} experts do not fill {routing.groups} groups", "restore config.json")
    if routing.kept_groups > routing.groups:
        raise refusal("topk_group", f"more than the {routing.groups} groups", "restore config.json")
    if config.experts_per_token > routing.kept_groups * size:
        message = f"more than the {routing.kept_groups * size} experts of the kept groups"
        raise refusal("num_experts_per_tok", message, "restore config.json")
    if config.index is not None and config.index.width < config.rope:
        raise refusal("index_head_dim", f"narrower than the rotary part ({config.rope})", "restore config.json")
    if config.index is not None and config.query_rank is None:
        raise refusal("q_lora_rank", "the indexer needs the query latent", "restore config.json")
