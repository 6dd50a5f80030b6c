"""Block-scaled product for few tokens on Hopper: launches of `gemm_stream.cu`. Definition: reference/gemm.py.

One launch, no workspace, no allocation: it captures into a CUDA graph. A token's bits depend on that token, the weights
and the `Stream` alone; `Stream`s of the same depth_groups and split give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels.cuda.driver import Kernel, compile_cubin, load, tensor_map
from kernels.cuda.gemm_choice import Stream
from kernels.cuda.gemm_pack import PackedFp4
from kernels.errors import KernelError
from kernels.reference.gemm import (
    DEPTH,
    Activations,
    Fp8Weights,
    check_activations,
    check_operands,
    padded_tokens,
)

SOURCE = Path(__file__).with_suffix(".cu")
_Map = ctypes.c_uint64 * 16


class _Parameters(ctypes.Structure):
    _fields_ = [("weight_map", _Map), ("activation_map", _Map),
                ("packed", ctypes.c_void_p), ("weight_scales", ctypes.c_void_p), ("scales", ctypes.c_void_p),
                ("output", ctypes.c_void_p), ("counts", ctypes.c_void_p), ("experts", ctypes.c_void_p),
                ("groups", ctypes.c_int), ("capacity", ctypes.c_int), ("padded", ctypes.c_int),
                ("rows", ctypes.c_int), ("blocks", ctypes.c_int), ("unused", ctypes.c_int * 13)]  # fmt: skip


def gemm_stream(
    activations: Activations, weights: Fp8Weights | PackedFp4, counts: Tensor | None, experts: Tensor | None,
    output: Tensor, stream: Stream,
) -> None:  # fmt: skip
    """Fill output bf16 [groups, capacity, rows] where tokens count; elsewhere it keeps its bytes.

    Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    if isinstance(weights, PackedFp4):
        check_activations(activations, counts, experts, len(weights.chunks), weights.rows, output)
        if weights.channels != activations.codes.shape[2]:
            raise KernelError(f"weights have {weights.channels} channels", fix="pass those of this layer")
    else:
        check_operands(activations, weights, counts, experts, output)
    parameters = parameters_of(activations, weights, counts, experts, output, stream, tensor_map)
    fp4, grain = isinstance(weights, PackedFp4), weights.grain
    dense = parameters.groups == 1 and counts is None and experts is None
    kernel = _kernel(stream, fp4, grain, dense, activations.codes.device.index)
    kernel.launch((stream.blocks(parameters.groups, parameters.capacity, parameters.rows), 1, 1), parameters)


def parameters_of(
    activations: Activations, weights: Fp8Weights | PackedFp4, counts: Tensor | None, experts: Tensor | None,
    output: Tensor, stream: Stream, describe: Callable[[Tensor, tuple[int, int, int]], bytes],
) -> _Parameters:  # fmt: skip
    """What the kernel takes; `describe` makes tensor maps."""
    groups, capacity, channels = activations.codes.shape
    found = _Parameters(groups=groups, capacity=capacity, padded=padded_tokens(capacity), blocks=channels // DEPTH)
    found.scales, found.output = activations.scales.data_ptr(), output.data_ptr()
    found.counts = 0 if counts is None else counts.data_ptr()
    found.experts = 0 if experts is None else experts.data_ptr()
    found.activation_map = _Map.from_buffer_copy(describe(activations.codes, (1, stream.tokens, DEPTH)))
    if isinstance(weights, PackedFp4):
        found.packed, found.rows = weights.chunks.data_ptr(), weights.rows
    else:
        found.weight_scales, found.rows = weights.scales.data_ptr(), weights.codes.shape[1]
        found.weight_map = _Map.from_buffer_copy(describe(weights.codes, (1, stream.block_rows, DEPTH)))
    return found


def defines_for(stream: Stream, fp4: bool, grain: int, dense: bool = False) -> dict[str, int]:
    """Macros the source is compiled with. `dense`: one group of tokens, which all count."""
    return {"FORMAT": 4 if fp4 else 8, "GRAIN": grain, "TOKENS": stream.tokens, "ROW_GROUPS": stream.row_groups,
            "DEPTH_GROUPS": stream.depth_groups, "SPLIT": stream.split, "STAGES": stream.stages(fp4),
            "ONCE": int(stream.once), "RESIDENT": stream.resident, "DENSE": int(dense),
            "FETCHERS": stream.fetchers}  # fmt: skip


def compile_for(
    stream: Stream, fp4: bool, grain: int, dense: bool = False, architecture: str = "sm_90a"
) -> tuple[bytes, str]:
    """Machine code and the compiler's report; needs no GPU."""
    return compile_cubin(SOURCE, architecture, defines_for(stream, fp4, grain, dense))


@functools.cache
def _kernel(stream: Stream, fp4: bool, grain: int, dense: bool, device: int) -> Kernel:
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise KernelError("this kernel is for Hopper (sm_90a)", fix="choose kernels=reference on this GPU")
    with torch.cuda.device(device):
        cubin = compile_for(stream, fp4, grain, dense)[0]
        return load(cubin, "gemm_stream", stream.threads, stream.shared_bytes(fp4))
