"""Expert choice on a GPU: launches of `gate.cu`. Shapes, formula and ties: reference/gate.py.

One launch, no workspace, no allocation: it captures into a CUDA graph. A row's choice depends on that row alone, a
replica on its place in the batch as well.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load
from kernels.errors import KernelError
from kernels.reference.gate import GateOperands, GateSpec, check_operands

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, ROWS_A_BLOCK = 128, 4


class Parameters(ctypes.Structure):
    """Of the launch, as the source has them."""

    _fields_ = [("logits", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("table", ctypes.c_void_p),
                ("tokens", ctypes.c_void_p), ("replicas", ctypes.c_void_p), ("replica_counts", ctypes.c_void_p),
                ("experts", ctypes.c_void_p), ("weights", ctypes.c_void_p), ("rows", ctypes.c_int),
                ("replica_stride", ctypes.c_int), ("scaling", ctypes.c_float)]  # fmt: skip


def gate(spec: GateSpec, given: GateOperands, experts: Tensor, weights: Tensor) -> None:
    """Fill experts int32 and weights fp32, both [rows, topk].

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    parameters = parameters_of(spec, given, experts, weights)
    if parameters.rows:
        kernel = _kernel(spec, given.logits.device.index)
        kernel.launch((-(-parameters.rows // ROWS_A_BLOCK), 1, 1), parameters)


def parameters_of(spec: GateSpec, given: GateOperands, experts: Tensor, weights: Tensor) -> Parameters:
    """Checked operands of a launch. Raises KernelError."""
    check_operands(spec, given)
    shape = (given.logits.shape[0], spec.topk)
    for name, tensor, dtype in (("experts", experts, torch.int32), ("weights", weights, torch.float32)):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise KernelError(f"{name} is {found}", fix=f"pass contiguous {dtype} {list(shape)}")
    if given.logits.dtype != torch.float32:
        raise KernelError(f"logits is {given.logits.dtype}", fix="pass fp32")
    return Parameters(
        given.logits.data_ptr(), _at(given.bias), _at(given.table), _at(given.tokens), _at(given.replicas),
        _at(given.replica_counts), experts.data_ptr(), weights.data_ptr(), shape[0],
        0 if given.replicas is None else given.replicas.shape[1], spec.scaling,
    )  # fmt: skip


def defines_for(spec: GateSpec) -> dict[str, int]:
    """Macros the source is compiled with."""
    return {
        "EXPERTS": spec.experts, "TOPK": spec.topk, "SCORE": spec.score.value, "GROUPS": spec.groups,
        "KEPT": spec.kept_groups, "BEST": spec.group_best, "NORMALIZED": int(spec.normalized),
        "HASHED": int(spec.hashed),
    }  # fmt: skip


def compile_for(spec: GateSpec, architecture: str = "sm_90a") -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, architecture, defines_for(spec))


@functools.cache
def _kernel(spec: GateSpec, device: int) -> Kernel:
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        return load(compile_for(spec, f"sm_{major}{minor}")[0], "gate", THREADS, 0)


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
