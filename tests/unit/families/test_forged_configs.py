"""A config.json with any key of any wrong value: it is read, or refused by key, at once; nothing else ever happens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.scales import quantization
from engine.families import tiny
from engine.families.registry import package_of
from engine.inspect.__main__ import main as inspect_main

Config = dict[str, Any]
WRONG: tuple[object, ...] = (
    None, True, 0, -1, 2.5, float("inf"), float("nan"), 1e-300, "x", [], [1], [[1]], [{}], ["x"], {}, {"a": 1},
    1 << 31, 1 << 60, 10**30, {"type": ["x"]}, {"main": 3}, {"rope_type": "yarn", "factor": 1e308},
)  # fmt: skip
ALSO = (  # of either spelling, where the tiny configs have the other
    "architectures", "model_type", "layer_types", "mlp_layer_types", "compress_rates", "compress_ratios",
    "rope_parameters", "rope_scaling", "partial_rotary_factor", "num_hash_layers", "num_nextn_predict_layers",
    "num_mtp_layers", "serving", "quantization_config", "vision_config", "text_config", "tie_word_embeddings",
)  # fmt: skip
TIMES = ("num_hidden_layers", "n_routed_experts", "num_nextn_predict_layers", "hc_mult", "hc_sinkhorn_iters")


@pytest.fixture(scope="module", params=tiny.WRITERS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tiny.write(request.param, tmp_path_factory.mktemp("written") / request.param, 1)
    found: Config = json.loads((folder / "config.json").read_text())
    return found


def forged(config: Config) -> Iterator[Config]:
    """Every key of every section, and those of another spelling, with every wrong value in turn."""
    sections = [(), *((key,) for key, value in config.items() if isinstance(value, dict))]
    for section in sections:
        inner = config[section[0]] if section else config
        for key in dict.fromkeys([*inner, *ALSO]):
            for value in WRONG:
                changed = {**inner, key: value}
                yield {**config, section[0]: changed} if section else changed


def read(config: Config) -> None:
    package = package_of(config)
    quantization(config)
    parsed = import_module(f"{package}.config").parse(config)
    options = import_module(f"{package}.options").parse_options
    options(config) if package.endswith("v41") else options(config, parsed)


def test_every_wrong_value_is_read_or_refused_by_key(config: Config) -> None:
    refused = 0
    for changed in forged(config):
        try:
            read(changed)
        except CheckpointError as error:
            refused += 1
            assert error.item
            assert error.fix
            assert len(str(error)) < 2000
    assert refused > 300


@pytest.mark.parametrize("value", [1 << 60, 1 << 20])
def test_what_is_built_once_for_each_is_bounded(config: Config, value: int) -> None:
    section = "text_config" if "text_config" in config else None
    inner = config[section] if section else config
    given = [key for key in TIMES if key in inner]
    assert len(given) >= 2
    for key in given:
        changed = {**inner, key: value}
        with pytest.raises(CheckpointError) as refused:
            read({**config, section: changed} if section else changed)
        assert refused.value.item == key


@pytest.mark.parametrize(
    ("settings", "item"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantization_config.quant_method"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "quantization_config.fmt"),
        (
            {"quant_method": "fp8", "scale_fmt": "int8", "weight_block_size": [128, 128]},
            "quantization_config.scale_fmt",
        ),
        ({"quant_method": "fp8", "expert_dtype": "nf4", "weight_block_size": [32, 32]}, "quantization_config.expert_"),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, "quantization_config.weight_block_size"),
        ("fp8", "quantization_config"),
    ],
)
def test_an_unknown_format_is_refused_by_key(settings: object, item: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        quantization({"quantization_config": settings})
    assert refused.value.item.startswith(item)


def test_a_matrix_beyond_any_machine_is_refused_by_name(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = config.get("text_config", config)
    inner = {**inner, "vocab_size": (1 << 31) - 1, "hidden_size": (1 << 31) - 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "text_config": inner} if "text_config" in config else inner))
    assert inspect_main([str(path)]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert "embed" in error["field"]
    assert "too large" in error["message"]
