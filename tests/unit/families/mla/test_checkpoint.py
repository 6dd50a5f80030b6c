"""Checkpoints of V2, V3 and V3.2: FP8 means what an independent dequantization says, and errors name the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.reader import Reader
from engine.families.mla.names import upstream
from engine.families.v4 import tiny as v4_tiny
from tests.support.tiny_mla import (
    TINY,
    TinySpec,
    open_tiny,
    poisoned_pool,
    random_tokens,
    run_in_chunks,
    write_tiny,
)


def dequantized(weight: torch.Tensor, scale: torch.Tensor, block: int) -> np.ndarray:
    """Element by element, straight from the definition of E4M3 and of a block scale."""
    codes = weight.view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where(codes >> 7, -magnitude, magnitude).astype(np.float32)
    scales = (
        scale.numpy()
        if scale.dtype == torch.float32
        else np.float32(2.0) ** (scale.view(torch.uint8).numpy().astype(np.float32) - 127)
    )
    out = np.empty_like(values)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = values[i, j] * scales[i // block, j // block]
    return out


@pytest.mark.parametrize("exponents", [False, True], ids=["fp32-scales", "ue8m0-scales"])
def test_fp8_loads_equal_an_independent_dequantization_bit_for_bit(exponents: bool, tmp_path: Path) -> None:
    """Blocks of 40 end ragged in every tensor: 48, 128 and 256 are no multiples of it."""
    write_tiny(tmp_path, TinySpec("v32", 2, fp8_block=40, exponent_scales=exponents))
    stored, reader = load_file(tmp_path / "model.safetensors"), Reader(Folder(tmp_path), upstream)
    names = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    layer = [name for name in names if name.startswith("model.layers.1.")]
    assert len(layer) > 30
    for name in layer:
        wanted = dequantized(stored[name], stored[f"{name}_scale_inv"], 40)
        assert reader.floats(upstream(name), *stored[name].shape).numpy().tobytes() == wanted.tobytes(), name


def test_an_fp8_checkpoint_equals_the_same_numbers_stored_plainly(tmp_path: Path) -> None:
    write_tiny(tmp_path / "fp8", TinySpec("v3", 2, fp8_block=40))
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    plain = {
        name: torch.from_numpy(dequantized(tensor, stored[f"{name}_scale_inv"], 40))
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    write_tiny(tmp_path / "plain", TinySpec("v3", 2))
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    tokens = random_tokens(33, 1)
    families = [open_tiny(tmp_path / name) for name in ("fp8", "plain")]
    fp8, plainly = (run_in_chunks(family, poisoned_pool(family), tokens, 33) for family in families)
    assert torch.equal(fp8, plainly)


@pytest.mark.parametrize("name", TINY)
def test_what_transformers_saves_loads_as_what_upstream_writes(name: str, tmp_path: Path) -> None:
    transformers_logging.disable_progress_bar()
    written = write_tiny(tmp_path / "upstream", TinySpec(name, 4))
    AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    tokens = random_tokens(33, 1)
    families = [open_tiny(tmp_path / folder) for folder in ("upstream", "saved")]
    before, after = (run_in_chunks(family, poisoned_pool(family), tokens, 33) for family in families)
    assert torch.equal(before, after)


def test_the_mtp_block_is_loaded_and_changes_no_logit(tmp_path: Path) -> None:
    with_mtp = open_tiny(write_tiny(tmp_path / "mtp", TinySpec("v3", 4, {"num_nextn_predict_layers": 1})))
    without = open_tiny(write_tiny(tmp_path / "none", TinySpec("v3", 4)))
    assert (len(with_mtp.weights.mtp), len(without.weights.mtp)) == (1, 0)
    assert torch.equal(with_mtp.weights.mtp[0].embedding, with_mtp.weights.embedding)
    tokens = random_tokens(17, 1)
    found = [run_in_chunks(family, poisoned_pool(family), tokens, 17) for family in (with_mtp, without)]
    assert torch.equal(*found)


def test_an_mtp_block_without_its_own_embedding_and_head_takes_the_models(tmp_path: Path) -> None:
    write_tiny(tmp_path, TinySpec("v3", 4, {"num_nextn_predict_layers": 1}))
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        edit_tensor(tmp_path, f"model.layers.4.{name}", None)
    weights = open_tiny(tmp_path).weights
    assert weights.mtp[0].embedding is weights.embedding
    assert weights.mtp[0].logits is weights.logits


def test_a_config_with_an_mtp_layer_that_the_weights_lack_opens_without_it(tmp_path: Path) -> None:
    write_tiny(tmp_path, TinySpec("v3", 4))
    edit_config(tmp_path, num_nextn_predict_layers=1)
    assert open_tiny(tmp_path).weights.mtp == ()


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def edit_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    stored = load_file(folder / "model.safetensors")
    stored.pop(name, None)
    save_file(stored if tensor is None else {**stored, name: tensor}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.self_attn.kv_b_proj.weight", None, "missing"),
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", torch.ones(47, 128), "shape"),
        ("model.layers.9.self_attn.o_proj.weight", torch.ones(2, 2), "unknown tensor"),
        ("model.layers.2.mlp.gate.weight", torch.full((8, 128), torch.nan), "NaN"),
    ],
)
def test_a_wrong_tensor_is_named(name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, TinySpec("v3", 1))
    edit_tensor(tmp_path, name, tensor)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_tiny(tmp_path)
    assert caught.value.item.removeprefix("model.") == name.removeprefix("model.")


def test_a_wrong_block_size_names_the_scale(tmp_path: Path) -> None:
    write_tiny(tmp_path, TinySpec("v3", 1, fp8_block=40))
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    with pytest.raises(CheckpointError, match="do not fit blocks") as caught:
        open_tiny(tmp_path)
    assert caught.value.item.endswith("weight_scale_inv")


def test_a_v3_config_over_v4_weights_is_refused_with_a_tensor(tmp_path: Path) -> None:
    v4_tiny.write_tiny(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY["v3"]), encoding="utf-8")
    with pytest.raises(CheckpointError, match="unknown") as caught:
        open_tiny(tmp_path)
    assert caught.value.item.startswith("model.layers.0.ffn.gate.")  # V3 calls it mlp
