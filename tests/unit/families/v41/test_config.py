"""V4.1's configuration: the published one gives the published schedule, and every mistake names its key or file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.errors import CheckpointError
from engine.families import architecture, open_family
from engine.families.v41.config import parse
from engine.families.v41.options import Options, parse_options
from engine.families.v41.tiny import TinySpec, write_tiny
from kernels import choose
from tests.support.tiny import fresh_pool, random_tokens, run_in_chunks
from tests.unit.families.v41.material import DATA, flash_config

TINY = DATA / "tiny-q"


def changed(**text: Any) -> dict[str, Any]:
    config = flash_config()
    return {**config, "text_config": {**config["text_config"], **text}}


def test_the_published_config_gives_the_published_schedule() -> None:
    roles = parse(flash_config()).schedule.roles
    assert [i for i, role in enumerate(roles) if role.source == i] == [2, 8, 14, 20]
    assert [i for i, role in enumerate(roles) if role.chooser == i] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [i for i, role in enumerate(roles) if role.restricted] == [24, 28, 32, 36]
    assert [i for i, role in enumerate(roles) if role.ratio == 0] == [0, 1]
    assert {(role.source, role.chooser) for role in roles[25:28]} == {(20, 24)}
    assert {(role.source, role.chooser) for role in roles[15:20]} == {(14, 14)}


def test_the_decoder_half_of_the_published_model_owns_no_entries() -> None:
    config = parse(flash_config())
    assert (config.layers, config.schedule.last_source, config.draft_layers) == (40, 20, 3)
    assert config.schedule.sources(2) == (2, 8, 14)
    assert config.schedule.sources(1) == (20,)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"head_dim": 0}, "head_dim"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"compress_ratios": [0, 2]}, "compress_ratios"),
        ({"compress_ratios": [4] * 40}, "compress_ratios"),
        ({"layer_types": ["sliding_attention"] * 39}, "layer_types"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [8, 2]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [8], "candidate_source_layer_id": -1}, "kv_source_layer_ids"),
        ({"index_source_layer_ids": [2, 8, 20]}, "index_source_layer_ids"),
        ({"index_source_layer_ids": [2, 8, 14, 20, 99]}, "index_source_layer_ids"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id"),
        ({"candidate_source_layer_id": 14}, "candidate_source_layer_id"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks"),
        ({"engram_layer_ids": [1]}, "engram_num_embeddings"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size"),
        ({"engram_pad_token_id": 129280}, "engram_pad_token_id"),
        ({"qk_rope_head_dim": 65}, "qk_rope_head_dim"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"o_groups": 3}, "o_groups"),
        ({"index_head_dim": 8}, "index_head_dim"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok"),
        ({"eos_token_id": "1"}, "eos_token_id"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(changed(**changes))
    assert (caught.value.file, caught.value.item) == ("config.json", key)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("section", "key"),
    [([], "serving"), ({"fake_quantise": True}, "serving"), ({"decoder_replay": 1}, "decoder_replay")],
)
def test_a_wrong_serving_section_is_refused(section: object, key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_options({"serving": section})
    assert caught.value.item == key


def test_options_are_off_unless_the_config_turns_them_on_but_for_the_replay_of_hits() -> None:
    assert parse_options({}) == Options(encoder_replay=True)
    assert parse_options({"serving": {"encoder_replay": False}}) == Options()
    chosen = parse_options({"serving": {"decoder_replay": True}})
    assert chosen == Options(encoder_replay=True, decoder_replay=True)


def test_both_names_lead_to_this_family() -> None:
    assert architecture({"architectures": ["DeepseekV41ForCausalLM"]}) == "DeepseekV41ForCausalLM"
    assert architecture({"model_type": "deepseek_v41"}) == "DeepseekV41ForCausalLM"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_family(folder, torch.float32, False, choose("reference"))
    return caught.value


def rewrite(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers.4.attn.compressor.wgate.weight", None, "missing"),
        ("layers.8.attn.indexer.wk.weight", torch.zeros(32, 64), "unknown"),
        ("layers.1.engram.embed.weight", torch.zeros(1463, 32), "config asks for"),
        ("layers.1.engram.embed.scale", torch.full((1464, 1), 255, dtype=torch.uint8), "NaN"),
        ("layers.1.engram.embed.scale", torch.full((1463, 1), 127, dtype=torch.uint8), "do not fit"),
        ("layers.3.ffn.gate.bias_vl", torch.full((8,), torch.nan), "NaN"),
    ],
)
def test_a_wrong_tensor_is_refused_by_its_name(name: str, value: Any, message: str, copied: Path) -> None:
    rewrite(copied, lambda weights: weights.pop(name) if value is None else weights.__setitem__(name, value))
    error = refused(copied)
    assert error.item == name
    assert message in str(error)


def test_tables_of_another_size_than_the_hash_are_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["engram_vocab_size"] = 200
    (copied / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert refused(copied).item == "engram_num_embeddings"


def test_blocks_of_another_size_are_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["weight_block_size"] = [128, 128]
    (copied / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert refused(copied).item.endswith(".scale")


@pytest.mark.parametrize("quantized", [False, True])
def test_a_written_tiny_checkpoint_opens_and_is_not_degenerate(quantized: bool, tmp_path: Path) -> None:
    family = open_family(
        write_tiny(tmp_path, TinySpec(seed=2, quantized=quantized)), torch.float32, True, choose("cpu")
    )
    logits = run_in_chunks(family, fresh_pool(family), random_tokens(60, 4), 60)
    assert torch.isfinite(logits).all()
    assert logits.std() > 1


def test_plain_tables_and_the_names_transformers_writes_mean_the_same(copied: Path) -> None:
    def plain(weights: dict[str, torch.Tensor]) -> None:
        for layer in (1, 4):
            scale = weights.pop(f"layers.{layer}.engram.embed.scale").to(torch.float32)
            name = f"layers.{layer}.engram.embed.weight"
            weights[name] = (weights[name].to(torch.float32) * scale).to(torch.bfloat16)  # one block per row
        for name in list(weights):
            weights["lm_head.weight" if name == "head.weight" else f"model.{name}"] = weights.pop(name)

    rewrite(copied, plain)
    tokens, logits = random_tokens(30, 8), []
    for folder in (TINY, copied):
        family = open_family(folder, torch.float32, True, choose("cpu"))
        logits.append(run_in_chunks(family, fresh_pool(family), tokens, 30))
    assert torch.equal(*logits)
