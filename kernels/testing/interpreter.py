"""Triton's interpreter with its wrong conversions put right. Knows no kernel.

Triton 3.6 interprets fp32 -> bf16 by truncation, -> E4M3 without carry or saturation, E4M3's NaN as a number, and
products of bf16 matrices as products of their bits.
"""

from __future__ import annotations

import argparse
import os
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

_TYPES = {
    "fp32": (torch.float32, np.uint32),
    "fp16": (torch.float16, np.uint16),
    "bf16": (torch.bfloat16, np.uint16),
    "fp64": (torch.float64, np.uint64),
    "fp8e4nv": (torch.float8_e4m3fn, np.uint8),
    "fp8e5": (torch.float8_e5m2, np.uint8),
}


def require_interpreter() -> None:
    """Correct the interpreter of this process, a command without options. SystemExit where triton does not interpret,
    for `--help`, and for arguments."""
    command = sys.modules["__main__"]
    argparse.ArgumentParser(prog=f"python -m {_name(command)}", description=command.__doc__).parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1: this checks kernels without a GPU")
    interpreter._convert_float = _convert
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(builder, _wide(a), _wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _name(command: ModuleType) -> str:
    return command.__spec__.name if command.__spec__ is not None else str(command.__file__)


def _wide(handle: Any) -> Any:
    """bf16 as fp32; others as they are."""
    if handle.dtype.scalar is not tl.bfloat16:
        return handle
    return interpreter.TensorHandle(_convert(handle.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)


def _convert(data: NDArray[np.generic], given: tl.dtype, wanted: tl.dtype, _rounding: object) -> NDArray[np.generic]:
    """As a GPU does it: to nearest even, E4M3 saturating."""
    source, _ = _TYPES[given.name]
    target, bits = _TYPES[wanted.name]
    values = torch.frombuffer(bytearray(data.tobytes()), dtype=source)
    if target is torch.float8_e4m3fn:
        values = values.to(torch.float32).clamp(-448, 448)
    found = values.to(target).view(torch.uint8).numpy().view(bits)
    return found.reshape(data.shape)
