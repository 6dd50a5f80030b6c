"""Stored formats decoded bit for bit as an independent decoder does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.folder import Folder
from engine.checkpoint.formats import FormatError, fp4_packed, fp8_blocks, scale_values
from engine.checkpoint.quantize import fp4_quantize, fp8_quantize
from engine.checkpoint.reader import Reader
from engine.families.v4.names import upstream
from tests.support.tiny import TinySpec, write_tiny

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(byte: int) -> float:
    """OCP FP8 E4M3: sign, four exponent bits of bias 7, three of mantissa; no infinities."""
    sign, exponent, mantissa = (-1.0 if byte & 0x80 else 1.0), byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def stored_bytes(folder: Path) -> dict[str, tuple[str, list[int], np.ndarray]]:
    """The raw content of a safetensors file, read by hand."""
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    data = np.frombuffer(raw[8 + length :], np.uint8)
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def decoded(name: str, tensors: dict[str, tuple[str, list[int], np.ndarray]], block: int) -> np.ndarray:
    """One quantized weight in float64, element by element."""
    kind, shape, raw = tensors[name]
    scales = 2.0 ** (tensors[name.removesuffix("weight") + "scale"][2].astype(np.float64) - 127)
    scale_shape = tensors[name.removesuffix("weight") + "scale"][1]
    scales = scales.reshape(scale_shape)
    if kind == "F8_E4M3":
        values = np.array([e4m3(byte) for byte in range(256)])[raw].reshape(shape)
        rows, columns = np.arange(shape[0]) // block, np.arange(shape[1]) // block
        return values * scales[rows[:, None], columns[None]]
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(shape[0], shape[1] * 2)
    values = np.array([*FP4, *(-v for v in FP4)])[codes]
    return values * scales[:, np.arange(shape[1] * 2) // 32]


def test_a_quantized_checkpoint_equals_an_independent_dequantization_bit_for_bit(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, TinySpec(upstream=True, quantized=True))
    raw = stored_bytes(folder)
    reader = Reader(Folder(folder), upstream)
    checked = {"F8_E4M3": 0, "I8": 0}
    for name, (kind, shape, _) in raw.items():
        if kind in checked:
            wanted = decoded(name, raw, 48)
            assert wanted.shape == (shape[0], shape[1] * (2 if kind == "I8" else 1))
            found = reader.floats(name, *wanted.shape).numpy().astype(np.float64)
            assert found.tobytes() == wanted.tobytes() or np.array_equal(found, wanted)
            checked[kind] += 1
    assert checked["F8_E4M3"] > 40
    assert checked["I8"] > 100


def test_fp8_takes_fp32_scales_and_a_ragged_last_block() -> None:
    weight = torch.randn(50, 70, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    found = fp8_blocks(weight, scale, (32, 32))
    for row, column in [(0, 0), (31, 31), (32, 31), (49, 69), (49, 0)]:
        assert found[row, column] == weight[row, column].float() * scale[row // 32, column // 32]


def test_a_wrong_block_size_is_refused_before_it_spoils_weights() -> None:
    weight = torch.zeros(48, 64).to(torch.float8_e4m3fn)
    with pytest.raises(FormatError, match=r"scales \[3, 4\] do not fit blocks of \[32, 32\]"):
        fp8_blocks(weight, torch.ones(3, 4), (32, 32))


@pytest.mark.parametrize("byte", [0, 1, 126, 127, 128, 254])
def test_every_e8m0_byte_is_its_power_of_two(byte: int) -> None:
    assert scale_values(torch.tensor([byte], dtype=torch.uint8)).item() == 2.0 ** (byte - 127)


@pytest.mark.parametrize(
    "scale",
    [
        torch.tensor([255], dtype=torch.uint8),
        torch.tensor([float("nan")]),
        torch.tensor([float("inf")]),
        torch.tensor([0.0]),
        torch.tensor([-1.0]),
    ],
)
def test_a_scale_that_cannot_be_is_refused(scale: torch.Tensor) -> None:
    with pytest.raises(FormatError):
        scale_values(scale)


def test_fp4_unpacks_the_low_nibble_first() -> None:
    packed = torch.full((1, 16), 0x21, dtype=torch.uint8)
    found = fp4_packed(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert found[0, :4].tolist() == [1.0, 2.0, 1.0, 2.0]


def test_quantizing_what_was_dequantized_changes_nothing() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    once = fp8_blocks(*fp8_quantize(weight, (32, 32)), (32, 32))
    assert torch.equal(fp8_blocks(*fp8_quantize(once, (32, 32)), (32, 32)), once)
    assert (once - weight).abs().max() < 0.2
    packed = fp4_packed(*fp4_quantize(weight))
    assert torch.equal(fp4_packed(*fp4_quantize(packed)), packed)


@pytest.mark.parametrize("block", [128, 32, 40])
@pytest.mark.parametrize("exponents", [False, True], ids=["fp32", "ue8m0"])
def test_blocks_of_every_published_size_equal_plain_arithmetic(block: int, exponents: bool, tmp_path: Path) -> None:
    """All 254 finite codes, ragged last blocks, and scales from very small to very large: one rounding, to fp32."""
    generator = torch.Generator().manual_seed(block)
    codes = torch.randint(0, 127, (200, 300), dtype=torch.uint8, generator=generator)
    codes |= torch.randint(0, 2, (200, 300), dtype=torch.uint8, generator=generator) << 7
    shape = (-(-200 // block), -(-300 // block))
    exponent = torch.randint(20, 235, shape, dtype=torch.uint8, generator=generator)
    scale = exponent if exponents else torch.rand(shape, generator=generator) * 1e-3 + 1e-6
    stored = scale.view(torch.float8_e8m0fnu) if exponents else scale
    save_file({"w.weight": codes.view(torch.float8_e4m3fn), "w.scale": stored}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"weight_block_size": [block, block]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = np.array([e4m3(code) for code in range(256)])[codes.numpy()]
    factors = 2.0 ** (scale.numpy().astype(np.float64) - 127) if exponents else scale.numpy().astype(np.float64)
    wanted = values * factors[np.arange(200)[:, None] // block, np.arange(300)[None] // block]
    found = Reader(Folder(tmp_path), str).floats("w.weight", 200, 300).numpy()
    assert found.tobytes() == wanted.astype(np.float32).tobytes()


def test_fp4_equals_plain_arithmetic_for_every_code_and_every_scale_that_stays_finite(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (50, 80), dtype=torch.uint8, generator=generator)
    scale = torch.arange(0, 250, dtype=torch.uint8).view(50, 5)
    tensors = {"w.weight": packed.view(torch.int8), "w.scale": scale.view(torch.float8_e8m0fnu)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(50, 160)
    values = np.array([*FP4, *(-value for value in FP4)])[codes]
    wanted = values * 2.0 ** (scale.numpy().astype(np.float64)[:, np.arange(160) // 32] - 127)
    found = Reader(Folder(tmp_path), str).floats("w.weight", 50, 160).numpy()
    assert np.array_equal(found.astype(np.float64), wanted)


@pytest.mark.parametrize(("quantized", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_bank_holds_every_value_of_its_experts_in_as_few_bytes_as_that_takes(
    quantized: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path, TinySpec(upstream=True, quantized=quantized))
    names = [f"layers.2.ffn.experts.{e}.w1.weight" for e in range(8)]
    last = torch.full((64, 128), 1 / 3) if not quantized else torch.ones(64, 128)
    bank = Reader(Folder(folder), upstream).stack(names, 64, 128, then=[last])
    reader = Reader(Folder(folder), upstream)
    assert bank.dtype == dtype
    assert torch.equal(bank.float(), torch.stack([*(reader.floats(name, 64, 128) for name in names), last]))


def test_a_bank_with_one_weight_that_bf16_cannot_hold_stays_in_fp32(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, TinySpec(upstream=True, quantized=True))
    names = ["layers.2.ffn.experts.0.w1.weight"]
    assert Reader(Folder(folder), upstream).stack(names, 64, 128, then=[torch.full((64, 128), 0.3)])[
        1, 0, 0
    ] == torch.tensor(0.3)
