"""The configuration of V2, V3 and V3.2: both sets of keys mean the same, and every mistake names its key."""

from __future__ import annotations

from typing import Any

import pytest

from engine.checkpoint.errors import CheckpointError
from engine.families.mla.config import parse
from engine.families.mla.layout import mla_layout
from engine.families.mla.tiny import TINY

LITE = {**TINY["v2"], "topk_method": "greedy", "n_group": 1, "topk_group": 1}


def as_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """The same model under the keys that transformers writes."""
    scaling = dict(config["rope_scaling"])
    moved = {"rope_type": scaling.pop("type"), "rope_theta": config["rope_theta"], **scaling}
    dense = config["first_k_dense_replace"]
    kinds = ["dense"] * dense + ["sparse"] * (config["num_hidden_layers"] - dense)
    kept = {k: v for k, v in config.items() if k not in ("rope_scaling", "rope_theta", "first_k_dense_replace")}
    kept["num_mtp_layers"] = kept.pop("num_nextn_predict_layers", 0)
    return {**kept, "rope_parameters": moved, "mlp_layer_types": kinds}


@pytest.mark.parametrize("name", TINY)
def test_upstream_and_transformers_keys_mean_the_same(name: str) -> None:
    assert parse(as_transformers(TINY[name])) == parse(TINY[name])


def test_published_v3_values_give_the_published_scale_and_bytes() -> None:
    scaling = {**TINY["v3"]["rope_scaling"], "factor": 40, "original_max_position_embeddings": 4096}
    published = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61, "first_k_dense_replace": 3}
    config = parse({**TINY["v3"], **published, "rope_scaling": scaling})
    assert config.rotary.amplitude == 1.0
    assert config.rotary.score_factor == pytest.approx(1.8739, abs=1e-4)
    assert sum(config.dense) == 3
    assert mla_layout(config, "bfloat16", 128).block_bytes == 128 * 70_272


def test_one_mscale_alone_sets_the_amplitude() -> None:
    scaling = {k: v for k, v in TINY["v3"]["rope_scaling"].items() if k != "mscale"}
    assert parse({**TINY["v3"], "rope_scaling": scaling}).rotary.amplitude == pytest.approx(1.13863, abs=1e-5)


def test_greedy_routing_knows_no_groups() -> None:
    assert (parse(LITE).routing.groups, parse(TINY["v2"]).routing.groups) == (1, 4)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("v3", {"hidden_size": None}, "hidden_size"),
        ("v3", {"kv_lora_rank": "32"}, "kv_lora_rank"),
        ("v3", {"q_lora_rank": 0}, "q_lora_rank"),
        ("v3", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("v3", {"topk_method": "greedy"}, "topk_method"),
        ("v3", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("v3", {"num_key_value_heads": 1}, "num_key_value_heads"),
        ("v3", {"first_k_dense_replace": 5}, "first_k_dense_replace"),
        ("v3", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        ("v3", {"mlp_layer_types": ["hash_moe"] * 4}, "mlp_layer_types"),
        ("v3", {"n_group": 3}, "n_group"),
        ("v3", {"n_group": 8}, "n_group"),
        ("v3", {"topk_group": 5}, "topk_group"),
        ("v3", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
        ("v3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling"),
        ("v3", {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ("v3", {"rope_theta": 0.5}, "rope_theta"),
        ("v3", {"eos_token_id": "1"}, "eos_token_id"),
        ("v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("v2", {"n_group": None}, "n_group"),
        ("v32", {"index_topk": None}, "index_topk"),
        ("v32", {"index_head_dim": 8}, "index_head_dim"),
        ("v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("v32", {"layer_types": ["indexed_attention"] * 3}, "layer_types"),
        ("v32", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(name: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse({**TINY[name], **changes})
    assert (caught.value.file, caught.value.item) == ("config.json", key)
    assert caught.value.fix
