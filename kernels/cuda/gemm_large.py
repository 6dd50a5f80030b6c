"""Block-scaled FP8 product for many tokens on Hopper: launches of `gemm_large.cu`. Definition: reference/gemm.py.

One launch, no workspace, no allocation: it captures into a CUDA graph. A token's bits depend on that token and the
weights alone, whatever the `Large`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load, tensor_map
from kernels.cuda.gemm_choice import Large
from kernels.cuda.gemm_pack import PackedFp4, check_packed
from kernels.errors import KernelError
from kernels.reference.gemm import DEPTH, Activations, Fp8Weights, check_operands, padded_tokens

SOURCE = Path(__file__).with_suffix(".cu")
_Map = ctypes.c_uint64 * 16
_LEAVING = (1, 16, 64)  # tokens and rows that one copy writes


class _Parameters(ctypes.Structure):
    _fields_ = [("activation_map", _Map), ("weight_map", _Map), ("output_map", _Map),
                ("weight_scales", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("output", ctypes.c_void_p),
                ("counts", ctypes.c_void_p), ("experts", ctypes.c_void_p), ("groups", ctypes.c_int),
                ("capacity", ctypes.c_int), ("padded", ctypes.c_int), ("rows", ctypes.c_int),
                ("blocks", ctypes.c_int), ("unused", ctypes.c_int)]  # fmt: skip


def gemm_large(
    activations: Activations, weights: Fp8Weights | PackedFp4, counts: Tensor | None, experts: Tensor | None,
    output: Tensor, large: Large,
) -> None:  # fmt: skip
    """Fill output bf16 [groups, capacity, rows] where tokens count; elsewhere it keeps its bytes.

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    if isinstance(weights, PackedFp4):
        check_packed(activations, weights, counts, experts, output)
    else:
        check_operands(activations, weights, counts, experts, output)
    if large.fp4 != isinstance(weights, PackedFp4) or (isinstance(weights, PackedFp4) and not weights.even):
        raise KernelError("weights are not of this cut's format, or FP4 of uneven scales", fix="cut as choose_cut says")
    parameters = parameters_of(activations, weights, counts, experts, output, large, tensor_map)
    kernel = _kernel(large, weights.grain, activations.codes.device.index)
    kernel.launch((large.blocks(parameters.groups, parameters.capacity, parameters.rows), 1, 1), parameters)


def parameters_of(
    activations: Activations, weights: Fp8Weights | PackedFp4, counts: Tensor | None, experts: Tensor | None,
    output: Tensor, large: Large, describe: Callable[[Tensor, tuple[int, int, int]], bytes],
) -> _Parameters:  # fmt: skip
    """What the kernel takes; `describe` makes tensor maps."""
    groups, capacity, channels = activations.codes.shape
    found = _Parameters(groups=groups, capacity=capacity, padded=padded_tokens(capacity), blocks=channels // DEPTH)
    found.scales, found.output, found.rows = activations.scales.data_ptr(), output.data_ptr(), output.shape[2]
    found.counts = 0 if counts is None else counts.data_ptr()
    found.experts = 0 if experts is None else experts.data_ptr()
    found.activation_map = _Map.from_buffer_copy(describe(activations.codes, (1, large.copied_tokens, DEPTH)))
    if isinstance(weights, PackedFp4):
        found.weight_scales = weights.chunks.data_ptr()
    else:
        found.weight_scales = weights.scales.data_ptr()
        found.weight_map = _Map.from_buffer_copy(describe(weights.codes, (1, large.rows, DEPTH)))
    found.output_map = _Map.from_buffer_copy(describe(output, _LEAVING))
    return found


def defines_for(large: Large, grain: int) -> dict[str, int]:
    """Macros the source is compiled with. Raises KernelError for a tile whose rows end within a scale's square."""
    if grain == 32 and large.rows % grain:
        raise KernelError(f"tiles of {large.rows} rows end within a square of {grain} that shares a scale",
                          fix=f"cut into multiples of {grain} rows")  # fmt: skip
    return {"GRAIN": grain, "ROWS": large.rows, "PASSES": large.passes, "SHARE": large.share,
            "STAGES": large.stages, "FP4": int(large.fp4)}  # fmt: skip


def compile_for(large: Large, grain: int, architecture: str = "sm_90a") -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, architecture, defines_for(large, grain))


@functools.cache
def _kernel(large: Large, grain: int, device: int) -> Kernel:
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise KernelError("this kernel is for Hopper (sm_90a)", fix="choose kernels=reference on this GPU")
    with torch.cuda.device(device):
        return load(compile_for(large, grain)[0], "gemm_large", large.threads, large.shared_bytes)
