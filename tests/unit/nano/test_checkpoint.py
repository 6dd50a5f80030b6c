"""The committed checkpoint: published names and formats, within its size, stored bit-exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from models.nano.config import HERE, load_config
from models.nano.export import INDEX, export, read, storage_of, stored

DTYPES = {"fp4": "I8", "fp8": "F8_E4M3", "int64": "I64", "float32": "F32", "bfloat16": "BF16"}


def headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    found = {}
    for file in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values())):
        with safe_open(folder / file, framework="pt") as part:
            for name in part.keys():  # noqa: SIM118
                piece = part.get_slice(name)
                found[name] = (piece.get_dtype(), piece.get_shape())
    return found


def test_checkpoint_stays_within_twenty_megabytes_in_shards_of_sixteen() -> None:
    sizes = [path.stat().st_size for path in HERE.glob("*.safetensors")]
    assert sum(sizes) <= 20_000_000
    assert max(sizes) <= 16_000_000


def test_every_tensor_has_its_published_format_and_scale() -> None:
    found = headers(HERE)
    for name, (dtype, shape) in found.items():
        if name.endswith(".scale"):
            assert dtype == "F8_E8M0"
            continue
        storage = storage_of(name)
        assert dtype == DTYPES[storage], name
        if storage == "fp4":
            assert found[name.removesuffix("weight") + "scale"][1] == [shape[0], shape[1] * 2 // 32]
        if storage == "fp8":
            assert found[name.removesuffix("weight") + "scale"][1] == [-(-shape[0] // 128), -(-shape[1] // 128)]


def test_names_cover_every_mechanism() -> None:
    names, config = set(headers(HERE)), load_config()
    for number, ratio in enumerate(config.compress_ratios):
        prefix = f"layers.{number}."
        assert (f"{prefix}attn.compressor.ape" in names) == (ratio > 0)
        assert (f"{prefix}attn.indexer.weights_proj.weight" in names) == (ratio == 4)
        assert (f"{prefix}ffn.gate.tid2eid" in names) == (number < config.num_hash_layers)
        assert (f"{prefix}ffn.gate.bias" in names) == (number >= config.num_hash_layers)
    experts = {int(match[1]) for name in names if (match := re.search(r"\.experts\.(\d+)\.", name))}
    assert experts == set(range(config.n_routed_experts))


def test_reading_and_storing_again_gives_the_same_bytes() -> None:
    again = stored(read(HERE))
    for file in sorted(HERE.glob("*.safetensors")):
        with safe_open(file, framework="pt") as part:
            for name in part.keys():  # noqa: SIM118
                assert torch.equal(part.get_tensor(name).view(torch.uint8), again[name].view(torch.uint8)), name


def test_export_replaces_older_shards(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00009.safetensors").write_bytes(b"old")
    export({"norm.weight": torch.ones(8)}, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert torch.equal(read(tmp_path)["norm.weight"], torch.ones(8))


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    export({"layers.0.attn.wkv.weight": torch.ones(128, 128)}, tmp_path)
    from safetensors.torch import load_file, save_file

    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    del tensors["layers.0.attn.wkv.scale"]
    save_file(tensors, shard)
    with pytest.raises(KeyError, match=r"layers\.0\.attn\.wkv\.scale"):
        read(tmp_path)
