"""Stored formats decoded bit for bit as an independent decoder does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

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
