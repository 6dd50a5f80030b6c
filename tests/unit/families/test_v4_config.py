"""V4's configuration: both sets of keys mean the same, and every mistake names its key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.errors import CheckpointError
from engine.families import architecture
from engine.families.rotary import GrowingRope, inverse_frequencies
from engine.families.v4.config import LayerKind, parse
from engine.families.v4.layout import v4_layout
from engine.families.v4.tiny import TINY, TRANSFORMERS_KEYS, UPSTREAM_KEYS
from engine.families.yarn import Rope

FLASH = {
    **{key: value for key, value in TINY.items() if key != "compress_rates"},
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "num_hash_layers": 3,
    "qk_rope_head_dim": 16,
    "num_nextn_predict_layers": 1,
}


def test_upstream_and_transformers_keys_mean_the_same() -> None:
    assert parse({**TINY, **UPSTREAM_KEYS}) == parse({**TINY, **TRANSFORMERS_KEYS})


def test_published_ratios_give_the_published_layers() -> None:
    config = parse(FLASH)
    assert (config.csa_rate, config.hca_rate, config.mtp_layers) == (4, 128, 1)
    assert [config.layers.count(kind) for kind in LayerKind] == [2, 21, 20]
    assert config.hashed[:4] == (True, True, True, False)
    assert v4_layout(config, "float32", 100).block_tokens == 128


def test_scaling_applies_to_the_compress_table_alone() -> None:
    config = parse({**TINY, **UPSTREAM_KEYS})
    assert config.main_rope == Rope(1e4, None)
    assert config.compress_rope.yarn is not None
    slow = inverse_frequencies(config.compress_rope, 16) / inverse_frequencies(Rope(1.6e5, None), 16)
    assert slow[0] == 1
    assert slow[-1] == pytest.approx(0.25)


def test_a_rope_table_grows_without_changing_what_it_held() -> None:
    growing = GrowingRope(Rope(1e4, None), 8)
    before = growing.upto(10).cos.clone()
    after = growing.upto(5000).cos
    assert len(after) >= 5000
    assert torch.equal(after[: len(before)], before)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "128"}, "hidden_size"),
        ({"head_dim": 0}, "head_dim"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"compress_ratios": [0, 4]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 4, 8, 4, 16, 4]}, "compress_ratios"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types"),
        ({"mlp_layer_types": ["dense"] * 7}, "mlp_layer_types"),
        ({"num_hash_layers": 8}, "num_hash_layers"),
        ({"qk_rope_head_dim": 65}, "qk_rope_head_dim"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"o_groups": 3}, "o_groups"),
        ({"index_head_dim": 8}, "index_head_dim"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"eos_token_id": "1"}, "eos_token_id"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse({**TINY, **UPSTREAM_KEYS, **changes})
    assert (caught.value.file, caught.value.item) == ("config.json", key)
    assert caught.value.fix


def test_a_config_of_another_family_is_refused() -> None:
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        architecture({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    assert architecture({"model_type": "deepseek_v4"}) == "DeepseekV4ForCausalLM"


def test_the_config_is_plain_data(tmp_path: Path) -> None:
    text = json.dumps(dataclasses.asdict(parse({**TINY, **UPSTREAM_KEYS})), default=lambda kind: kind.value)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert json.loads(text)["layers"][:3] == ["sliding_attention", "sliding_attention", "compressed_sparse_attention"]
