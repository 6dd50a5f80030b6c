"""Weights kept as they are published: which are, that their products are the defined ones, and what is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.checkpoint.errors import CheckpointError
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.families import open_family
from engine.families.mla import tiny as mla
from engine.families.v4 import tiny as v4
from engine.families.v41 import tiny as v41
from kernels import KernelError, choose
from kernels.reference import scaled
from kernels.reference.gemm import Fp4Weights, Fp8Weights, dequantize
from kernels.reference.linear import Dense
from kernels.reference.scaled import Scaled, ScaledExperts

WIDE = {"hidden_size": 256, "q_lora_rank": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
SHARED = {"hidden_size": 256, "q_lora_rank": 128, "moe_intermediate_size": 128, "o_lora_rank": 128, "head_dim": 64}


def write(family: str, folder: Path) -> Path:
    """A model whose matrices are as wide as products of stored weights ask for."""
    if family in mla.TINY:
        return mla.write_tiny(folder, mla.TinySpec(family, changes=WIDE, fp8_block=128, exponent_scales=family == "v3"))
    if family == "v4":
        return v4.write_tiny(folder, v4.TinySpec(quantized=True, overrides=tuple(SHARED.items())))
    return v41.write_tiny(folder, v41.TinySpec(quantized=True, overrides=tuple(SHARED.items())))


def opened(folder: Path, stored: bool) -> Any:
    return open_family(folder, torch.float32, False, choose("reference", stored=stored), 128, None)


def logits(family: Any, tokens: int = 40) -> torch.Tensor:
    """Of every row of one prompt."""
    rows = np.arange(tokens, dtype=np.int64)
    batch = RaggedBatch(
        (rows * 7 + 3) % family.vocab_size, rows, np.array([0, tokens], np.int32), np.zeros(1, np.int32),
        (np.zeros(1, np.int32),), np.zeros(1, np.int64), rows,
    )  # fmt: skip
    return family.forward(batch, CachePool(family.layout, 1, 1, torch.float32))


@pytest.mark.parametrize("family", ["v3", "v32", "v41"])
def test_without_rounding_stored_weights_give_the_logits_of_dequantized_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix is where it belongs, and its outputs in their order: only the casts of activations tell them apart,
    and in a random model those change the choice of experts."""
    folder = write(family, tmp_path / "model")
    rounded, whole = (logits(opened(folder, stored)) for stored in (True, False))
    monkeypatch.setattr(scaled, "_product", lambda x, weights: (x.double() @ dequantize(weights).mT).float())
    torch.testing.assert_close(logits(opened(folder, True)), whole, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(rounded, whole, rtol=1e-3, atol=1e-3)


def test_what_v3_publishes_in_fp8_is_kept(tmp_path: Path) -> None:
    model = opened(write("v3", tmp_path / "model"), stored=True)
    dense, moe = model.weights.layers[0], model.weights.layers[1]
    assert isinstance(dense.experts.gate, ScaledExperts) and dense.experts.gate.routed is None
    assert isinstance(moe.experts.gate, ScaledExperts) and moe.experts.gate.routed is not None
    codes = moe.experts.gate.routed[0].weights.codes
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == (8, 256, 256)
    assert all(isinstance(one, Scaled) for one in (moe.input, moe.query, moe.output))
    assert moe.query.order is not None and sorted(moe.query.order.tolist()) == list(range(4 * 48))
    assert isinstance(model.weights.logits, Dense) and isinstance(moe.attention.absorb, Dense)


def test_experts_of_v4_and_v41_stay_in_fp4_and_the_shared_one_in_fp8(tmp_path: Path) -> None:
    kept = opened(write("v41", tmp_path / "v41"), stored=True).weights.layers[0].experts.gate
    assert isinstance(kept.routed[0].weights, Fp4Weights) and isinstance(kept.shared[0].weights, Fp8Weights)
    assert kept.shared[0].weights.grain == 32
    model = opened(write("v4", tmp_path / "v4"), stored=True)  # whose FP8 blocks of 48 no product is defined for
    assert isinstance(model.weights.layers[0].experts.gate, Dense) and isinstance(model.weights.layers[0].query, Dense)


def test_a_matrix_that_no_product_takes_is_dequantized(tmp_path: Path) -> None:
    folder = mla.write_tiny(tmp_path / "model", mla.TinySpec("v3", fp8_block=16))
    assert torch.equal(logits(opened(folder, stored=True)), logits(opened(folder, stored=False)))


def test_a_product_has_the_defined_numbers_in_the_wanted_order(tmp_path: Path) -> None:
    ops, draw = choose("reference", stored=True), torch.Generator().manual_seed(0)
    codes = torch.randn(2, 16, 256, generator=draw).to(torch.float8_e4m3fn)
    weights, order = Fp8Weights(codes, torch.rand(2, 1, 2, generator=draw)), torch.arange(31, -1, -1)
    x = torch.randn(3, 512, generator=draw)
    found, plain = (ops.linear(x, ops.keep(weights, wanted)) for wanted in (order, None))
    assert torch.equal(found, plain.flip(1))
    exact = torch.cat(
        [
            x[:, :256].double() @ (codes[0].double() * weights.scales[0].double().repeat_interleave(128, 1)).T,
            x[:, 256:].double() @ (codes[1].double() * weights.scales[1].double().repeat_interleave(128, 1)).T,
        ],
        1,
    )
    assert float((plain - exact).norm() / exact.norm()) < 5e-2


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    folder = write("v3", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    bytes_of = tensors[name].view(torch.uint8).clone()
    bytes_of[0, 0] = 255
    save_file({**tensors, name: bytes_of.view(torch.float8_e8m0fnu)}, folder / "model.safetensors")
    with pytest.raises(Exception, match="a scale is NaN") as caught:
        opened(folder, stored=True)
    assert "experts.3.up_proj" in str(caught.value)


def test_stored_weights_are_refused_where_nothing_multiplies_with_them(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="choose weights=dequantized"):
        choose("cpu", stored=True)
    with pytest.raises(InvalidParameter, match="weights"):
        EngineConfig(tmp_path, weights="fp8")


def test_an_engine_decodes_from_stored_weights(tmp_path: Path) -> None:
    folder = write("v3", tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["weight_block_size"] == [128, 128]
    engine = Engine.open(EngineConfig(folder, num_blocks=8, kernels="reference", weights="stored"))
    assert engine.model.family == "deepseek_v3"


@pytest.mark.parametrize("expands", [True, False])
def test_latents_are_expanded_only_where_the_operators_are_faster_so(expands: bool, tmp_path: Path) -> None:
    asked = []

    def asks(*latents: object) -> bool:
        asked.append(latents)
        return expands

    folder, ops = mla.write_tiny(tmp_path / "model", mla.TinySpec("v3")), replace(choose("reference"), expands=asks)
    family = open_family(folder, torch.float32, False, ops, 128, None)
    assert asked == [(32, 16, torch.float32)]
    assert (family.weights.layers[0].attention.expand is not None) is expands
    torch.testing.assert_close(logits(family), logits(opened(folder, stored=False)), rtol=1e-4, atol=1e-4)


def test_v41_is_not_batch_invariant_on_a_gpu(tmp_path: Path) -> None:
    ops = replace(choose("reference"), batch_invariant=True, device=torch.device("cuda"))
    with pytest.raises(CheckpointError, match=r"not batch invariant on cuda.*choose device=cpu"):
        open_family(write("v41", tmp_path / "model"), torch.float32, True, ops, 128, None)
