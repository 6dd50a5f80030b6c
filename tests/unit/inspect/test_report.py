"""The report reproduces published totals, agrees with what files hold, and names what does not fit."""

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.checkpoint.folder import Folder
from engine.checkpoint.rank import Rank
from engine.checkpoint.sharding import part_bytes, parts
from engine.errors import InvalidParameter
from engine.families import tiny
from engine.families.inventory import read_model
from engine.families.registry import package_of
from engine.families.v41 import config as v41_config
from engine.families.v41 import records as v41_records
from engine.inspect.__main__ import main
from engine.inspect.caches import cache_costs
from engine.inspect.report import Question, inspect

ROOT = Path(__file__).parents[3]
FAMILIES = ["v2", "v3", "v32", "v4", "v41"]
QUANTIZED = ["v3", "v32", "v4", "v41"]


def few_experts(config):
    """The same caches from a model that is counted faster."""
    return {**config, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


def costs(config):
    """Format -> (bytes per token, bytes per sequence)."""
    found, _ = cache_costs(read_model(config))
    return {cost.format: (cost.bytes_per_token, cost.bytes_per_sequence) for cost in found}


def header(folder):
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length])


@pytest.mark.parametrize(
    ("name", "total", "draft", "active", "size"),
    [
        ("v3", 671.0, 13.5, 36.6, 688.6),  # published: 671 B and 37 B active, 688.6 GB with the MTP block
        ("v4-flash", 284.3, 6.6, 13.3, 159.6),  # 284 B and 13 B active, 159.6 GB
        ("v41-flash", 748.5, 0.0, 16.1, 502.4),  # 552 B and 196.6 B of Engram, 16 B active; drafts apart
    ],
)
def test_a_config_alone_gives_the_published_totals(published, name, total, draft, active, size):
    report = published(name)
    found = (report.parameters, report.draft_parameters, report.active_parameters, report.weight_bytes)
    assert [round(number / 1e9, 1) for number in found] == [total, draft, active, size]


def test_engram_and_backbone_of_v41_have_their_published_sizes(published):
    parts = {part.part: part.parameters for part in published("v41-flash").parts}
    assert parts["Engram tables"] == (384_006_168 + 384_016_682) * 256
    backbone = sum(parts.values()) - parts["Engram tables"] - parts["vision"]
    assert round(backbone / 1e9) == 552


def test_the_vision_part_is_counted_apart_and_by_no_token_or_rank(published, tiny_folder, tmp_path):
    report = published("v41-flash")
    vision = next(part for part in report.parts if part.part == "vision")
    layer = 4 * 1024**2 + 4 * 1024 + 3 * 1024 * 2816 + 2 * 1024  # attention with biases, MLP without, two norms
    below, above = 588 * 1024 + 1024 + 1024, 9216 * 5120 + 5120**2 + 2 * 5120 + 3 * 5120
    assert report.vision_parameters == vision.parameters == 32 * layer + below + above
    assert vision.active == 0
    assert vision.bytes == 2 * vision.parameters + 2 * 3 * 5120, "bf16; the markers are fp32"
    with_vision, text = inspect(Question(tiny_folder("v41"))), inspect(Question(without_vision(tiny_folder, tmp_path)))
    assert with_vision.ranks == text.ranks
    assert text.problems == ()
    assert text.vision_parameters == 0
    assert with_vision.parameters == text.parameters


def without_vision(tiny_folder, folder):
    """The tiny V4.1 whose weights leave out what the text model does not load; the config still names it."""
    tensors = load_file(tiny_folder("v41") / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(("vision.", "aligner.", "image_"))}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((tiny_folder("v41") / name).read_bytes())
    return folder


def test_a_half_vision_part_is_named(tiny_folder, tmp_path):
    tensors = load_file(tiny_folder("v41") / "model.safetensors")
    del tensors["image_newline"]
    save_file(tensors, without_vision(tiny_folder, tmp_path) / "model.safetensors")
    assert inspect(Question(tmp_path)).problems == ("1 missing: image_newline",)


def test_v3_takes_its_published_cache_bytes(config):
    assert costs(few_experts(config("v3"))) == {"bf16": (70_272, 0), "fp8": (40_016, 0)}


def test_v32_adds_its_index_keys(config):
    index = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    names = {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
    assert costs(few_experts({**config("v3"), **index, **names})) == {
        "bf16": (70_272 + 61 * 256, 0),
        "fp8": (48_068, 0),
    }


def test_v2_lite_takes_its_published_cache_bytes(config):
    names = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 27}
    lite = {**config("v3"), **names, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    assert costs(few_experts(lite))["bf16"] == (31_104, 0)


def test_v4_flash_takes_its_published_cache_bytes(config):
    found = costs({**config("v4-flash"), "n_routed_experts": 8})
    window, states = 43 * 74_752, 21 * (64 + 16) * 1024 + 20 * 512 * 1024
    assert {name: math.floor(per_token) for name, (per_token, _) in found.items()} == {
        "bf16": 6880,
        "fp8, fp4 index": 3514,
        "fp8, fp8 index": 3850,
    }
    assert found["fp8, fp4 index"][1] == found["fp8, fp8 index"][1] == window + states


def test_v41_takes_its_published_cache_bytes_and_agrees_with_its_own_records(config):
    given = config("v41-flash")
    given["text_config"]["n_routed_experts"] = 8
    model = read_model(given)
    canonical = next(cost for cost in cache_costs(model)[0] if cost.format == "fp4, fp8 window")
    window = next(group for group in canonical.groups if group.name == "window")
    parsed = v41_config.parse(given)
    assert canonical.bytes_per_token == v41_records.global_bytes_per_token(parsed) == 890
    assert window.bytes_per_sequence == v41_records.window_bytes_per_sequence(parsed) == 40 * 67_584
    assert costs(given)["bf16"][0] == 3200
    assert costs(given)["V4's fp8 rows"][0] == 1790


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_counted_as_its_file_holds_it(tiny_folder, family):
    folder = tiny_folder(family)
    tensors = header(folder)
    tensors.pop("__metadata__", None)
    scales = {name for name in tensors if name.endswith(".scale")}
    report = inspect(Question(folder))
    assert report.problems == ()
    counted = report.parameters + report.vision_parameters
    assert counted == sum(math.prod(tensors[name]["shape"]) for name in tensors.keys() - scales)
    assert report.weight_bytes == sum(end - begin for begin, end in (t["data_offsets"] for t in tensors.values()))
    assert sum(stored.tensors for stored in report.stored) == len(tensors)


@pytest.mark.parametrize("family", QUANTIZED)
def test_quantized_storage_changes_bytes_and_no_parameter(tiny_folder, family):
    plain, quantized = inspect(Question(tiny_folder(family))), inspect(Question(tiny_folder(family, True)))
    assert quantized.problems == ()
    assert (quantized.parameters, quantized.caches) == (plain.parameters, plain.caches)
    assert quantized.weight_bytes < plain.weight_bytes


def test_the_prediction_for_a_quantized_config_is_what_its_folder_stores(tiny_folder):
    """Linear weights and their scales; the tiny folder keeps fp32 where published ones have bf16."""
    report = inspect(Question(tiny_folder("v3", True)))
    stored = {one.type: one.bytes for one in report.stored}
    tensors = header(tiny_folder("v3", True))
    scales = [t["data_offsets"] for name, t in tensors.items() if name.endswith("_scale_inv")]
    assert report.formats["FP8 in blocks"] == stored["F8_E4M3"] + sum(end - begin for begin, end in scales)


def test_missing_unknown_and_misshapen_tensors_are_named(tiny_folder, tmp_path):
    folder = tiny_folder("v3")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.extra.weight"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].contiguous()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    missing, unknown, shape = inspect(Question(tmp_path)).problems
    assert missing == "1 missing: norm.weight"
    assert unknown == "1 unknown: layers.0.self_attn.extra.weight"
    assert "model.safetensors: lm_head.weight: shape [511, 128], the config asks for [512, 128]" in shape


def test_ranks_together_hold_the_model_and_what_they_replicate(tiny_folder):
    folder = tiny_folder("v4")
    [whole] = inspect(Question(folder)).ranks
    [rank] = inspect(Question(folder, (4,), (4,))).ranks
    assert whole.bytes == inspect(Question(folder)).weight_bytes
    assert 4 * rank.bytes == pytest.approx(whole.bytes + 3 * rank.replicated_bytes, abs=8)
    assert 4 * rank.expert_bytes == whole.expert_bytes


def test_experts_that_do_not_divide_make_the_largest_rank(tiny_folder):
    [rank] = inspect(Question(tiny_folder("v3"), (1,), (3,))).ranks
    [whole] = inspect(Question(tiny_folder("v3"))).ranks
    assert rank.expert_bytes == whole.expert_bytes * 3 // 8


def test_what_fits_is_as_much_as_there_is_room_for(published):
    report = published("v41-flash")
    [rank] = report.ranks
    assert [fit.format for fit in report.fits] == [cost.format for cost in report.caches]
    for fit, cost in zip(report.fits, report.caches, strict=True):
        fixed = rank.bytes + 4 * (cost.bytes_per_sequence + cost.rollback_bytes)
        assert fixed + fit.context_tokens * cost.bytes_per_token <= fit.memory_bytes
        assert fixed + (fit.context_tokens + 1) * cost.bytes_per_token > fit.memory_bytes


def test_weights_larger_than_the_memory_leave_no_context(tiny_folder):
    [fit] = inspect(Question(tiny_folder("v3"), memories=(1000,))).fits
    assert fit.context_tokens == 0


@pytest.mark.parametrize(("tensor", "expert", "field"), [(3, 1, "tp"), (1, 9, "ep"), (0, 1, "tp"), (1, 0, "ep")])
def test_a_division_that_cannot_be_is_refused(tiny_folder, tensor, expert, field):
    with pytest.raises(InvalidParameter) as refused:
        inspect(Question(tiny_folder("v3"), (tensor,), (expert,)))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "architectures"),
        ({"quantization_config": {"weight_block_size": 128}}, "quantization_config.weight_block_size"),
        ({"expert_dtype": "int3"}, "expert_dtype"),
    ],
)
def test_an_error_names_the_file_and_the_key(config, tmp_path, capsys, change, key):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**few_experts(config("v3")), **change}))
    assert main([str(path)]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == f"{path}: {key}"
    assert error["fix"]


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "not an object")])
def test_a_file_that_is_no_config_is_named(tmp_path, capsys, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main([str(path)]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == str(path)
    assert message in error["message"]


def test_a_path_that_is_not_there_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 1
    assert "does not exist" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_writers_are_the_families_under_test():
    assert list(tiny.WRITERS) == FAMILIES


@pytest.mark.parametrize("family", QUANTIZED)
def test_a_rank_costs_what_loading_by_rank_takes(tiny_folder, family):
    folder = Folder(tiny_folder(family, True))
    naming = import_module(f"{package_of(folder.config)}.names").NAMING
    mine = parts(folder, naming, Rank(0, 4, 0, 1))
    (cost,) = inspect(Question(folder.path, (1,), (4,))).ranks
    text = {name: part for name, part in mine.items() if not name.startswith(("vision.", "aligner.", "image_"))}
    assert cost.bytes == sum(part_bytes(folder, name, part) for name, part in text.items())


def test_ranks_that_would_cut_a_block_are_refused_with_the_tensor(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(few_experts(config("v3"))))
    with pytest.raises(InvalidParameter, match="in blocks of 128 do not divide among 128 tensor ranks") as refused:
        inspect(Question(path, (128,)))
    assert refused.value.field == "tp"
    assert ".weight" in refused.value.message
    assert "tensor ranks" in refused.value.fix


def test_no_family_is_counted_with_torchs_compiler_loaded(tiny_folder):
    script = (
        "import sys, pathlib; from engine.inspect.report import Question, inspect\n"
        "for path in sys.argv[1:]: inspect(Question(pathlib.Path(path)))\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    configs = [str(tiny_folder(family) / "config.json") for family in FAMILIES]
    done = subprocess.run([sys.executable, "-c", script, *configs], cwd=ROOT, timeout=200, check=False)
    assert done.returncode == 0


def test_the_three_window_states_cost_what_the_engine_would_take(published):
    v4, v41 = (published(name).window_states for name in ("v4-flash", "v41-flash"))
    assert [(choice.window_state, choice.recomputed_tokens) for choice in v4] == [
        ("exact", 0),
        ("replay", 128),
        ("recompute", 128 * 43),
    ]
    assert [choice.default for choice in v4] == [True, False, False]
    assert [choice.default for choice in v41] == [False, True, False], "as its makers serve it"
    assert [choice.anchor_bytes > 0 for choice in (*v4, *v41)] == [True, False, False] * 2
    assert not any(choice.refused for choice in (*v4, *v41))


def test_window_states_a_checkpoint_cannot_be_served_with_say_why(config, tmp_path):
    trimmed = {**config("v41-flash"), "serving": {"decoder_replay": True}}
    (tmp_path / "config.json").write_text(json.dumps(trimmed), encoding="utf-8")
    exact, replay, recompute = inspect(Question(tmp_path / "config.json")).window_states
    assert "every row of a prompt" in exact.refused and "every row of a prompt" in recompute.refused
    assert replay.default and not replay.refused


def test_a_model_without_windows_has_no_window_state_to_choose(published):
    assert published("v3").window_states == ()
