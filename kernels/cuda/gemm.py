"""Block-scaled product on Hopper by whichever kernel its cut belongs to. Definition: reference/gemm.py."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from kernels.cuda import gemm_large, gemm_stream
from kernels.cuda.gemm_choice import Large, Stream, choose_stream
from kernels.cuda.gemm_pack import PackedFp4
from kernels.reference.gemm import Activations, Fp8Weights


def gemm(
    activations: Activations, weights: Fp8Weights | PackedFp4, counts: Tensor | None, experts: Tensor | None,
    output: Tensor, cut: Stream | Large,
) -> None:  # fmt: skip
    """Fill output bf16 [groups, capacity, rows] where tokens count; elsewhere it keeps its bytes.

    `cut` is what `choose_cut` said for these shapes; FP4 weights of uneven scales take the kernel for few tokens
    whatever it is. Raises KernelError for operands the kernel does not take, before anything is launched.
    """
    if isinstance(cut, Large) and isinstance(weights, PackedFp4) and not weights.even:
        groups, rows, channels = len(weights.chunks), weights.rows, weights.channels
        cut = choose_stream(rows, channels, groups, cut.tokens, fp4=True)
    if isinstance(cut, Stream):
        gemm_stream.gemm_stream(activations, weights, counts, experts, output, cut)
    else:
        gemm_large.gemm_large(activations, weights, counts, experts, output, cut)


def source_for(cut: Stream | Large, fp4: bool, grain: int, dense: bool) -> tuple[Path, str, dict[str, int]]:
    """Source, architecture and macros of the kernel, for `compile_ahead`; `dense`: neither counts nor experts."""
    if isinstance(cut, Stream):
        return gemm_stream.SOURCE, "sm_90a", gemm_stream.defines_for(cut, fp4, grain, dense)
    return gemm_large.SOURCE, "sm_90a", gemm_large.defines_for(cut, grain)
