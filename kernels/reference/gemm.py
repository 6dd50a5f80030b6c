"""Block-scaled FP8 product in torch: output[g, t, r] = sum_k activation[g, t, k] * weight[g, r, k], for groups of rows.

Activations are e4m3 with an fp32 scale for 128 channels of a token, quantized by `quantize_activations`. Weights are
e4m3 with an fp32 scale for 128 x 128, e4m3 with an e8m0 scale for 32 x 32 (V4.1), or e2m1 (low nibble first) with an
e8m0 scale for 32 channels of a row (V4's experts). One group is a dense layer, several are experts. Tokens of experts
lie in groups of one size, of which the first `counts` are read and written (masked), or all in one group of activations
with the number of each token's expert in `experts`, in ascending runs that start at multiples of 128, tokens of -1
between them (contiguous).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import KernelError

DEPTH = 128  # channels of one activation scale
E4M3_MAX, E2M1_MAX = 448.0, 6.0
_SMALLEST = 1e-4  # of an amax: a token of zeros has a scale too
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """codes e4m3 [groups, capacity, channels]; scales fp32 [groups, channels / 128, capacity padded to 4]."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weights:
    """codes e4m3 [groups, rows, channels]; scales fp32 [groups, ceil(rows / 128), channels / 128], or e8m0 as uint8
    [groups, ceil(rows / 32), channels / 32]."""

    codes: Tensor
    scales: Tensor

    @property
    def grain(self) -> int:
        """Side of the square that shares a scale."""
        return 32 if self.scales.dtype == torch.uint8 else 128


@dataclass(frozen=True, slots=True, eq=False)
class Fp4Weights:
    """codes uint8 [groups, rows, channels / 2], the even channel in the low nibble; scales e8m0 as uint8
    [groups, rows, channels / 32]."""

    codes: Tensor
    scales: Tensor


def gemm(
    activations: Activations, weights: Fp8Weights | Fp4Weights, counts: Tensor | None = None,
    experts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """float64 [groups, capacity, rows]; zero at or behind a group's count (int32 [groups]) and where an expert (int32
    [capacity]) is -1."""
    return product(dequantize_activations(activations), dequantize(weights), counts, experts)


def product(x: Tensor, w: Tensor, counts: Tensor | None, experts: Tensor | None) -> Tensor:
    """`gemm` of x [groups, capacity, channels] and w [groups, rows, channels], which may hold anything where no token
    counts."""
    found = torch.zeros(*x.shape[:2], w.shape[1], dtype=x.dtype, device=x.device)
    for group, weight in enumerate(w):
        if experts is not None:
            found[0, experts == group] = x[0, experts == group] @ weight.T
        else:
            count = x.shape[1] if counts is None else int(counts[group])
            found[group, :count] = x[group, :count] @ weight.T
    return found


def written(activations: Activations, counts: Tensor | None, experts: Tensor | None) -> Tensor:
    """bool [groups, capacity]: the tokens that a product reads and writes."""
    groups, capacity, _ = activations.codes.shape
    if experts is not None:
        return experts[None] >= 0
    most = torch.full((groups,), capacity, device=activations.codes.device) if counts is None else counts
    return torch.arange(capacity, device=activations.codes.device) < most[:, None]


def quantize_activations(x: Tensor) -> Activations:
    """x [groups, capacity, channels] -> x / scale, scale = max |x| of 128 channels / 448, as DeepSeek-V3 has it."""
    groups, capacity, channels = x.shape
    parts = x.float().unflatten(2, (channels // DEPTH, DEPTH))
    scales = parts.abs().amax(3).clamp_min(_SMALLEST) / E4M3_MAX
    codes = (parts / scales[..., None]).to(torch.float8_e4m3fn).flatten(2)
    padded = torch.zeros(groups, channels // DEPTH, padded_tokens(capacity), device=x.device)
    padded[..., :capacity] = scales.mT
    return Activations(codes, padded)


def padded_tokens(capacity: int) -> int:
    """Tokens that a row of activation scales has room for: rows are 16-byte aligned."""
    return -(-capacity // 4) * 4


def quantize_fp8(weights: Tensor, grain: int = 128) -> Fp8Weights:
    """weights [groups, rows, channels] -> e4m3, scale = max |w| of a square / 448; of grain 32 rounded up to 2**n."""
    groups, rows, channels = weights.shape
    tall = -(-rows // grain)
    padded = torch.zeros(groups, tall * grain, channels, device=weights.device)
    padded[:, :rows] = weights
    squares = padded.view(groups, tall, grain, channels // grain, grain)
    scales = squares.abs().amax((2, 4)).clamp_min(_SMALLEST) / E4M3_MAX
    exponents = scales.log2().ceil().clamp(-127, 127)
    if grain == 32:
        scales = torch.exp2(exponents)
    codes = (squares / scales[:, :, None, :, None]).to(torch.float8_e4m3fn).view(groups, -1, channels)[:, :rows]
    return Fp8Weights(codes.contiguous(), (exponents + 127).to(torch.uint8) if grain == 32 else scales)


def quantize_fp4(weights: Tensor) -> Fp4Weights:
    """weights [groups, rows, channels] -> nearest e2m1 (ties: the smaller), scale = max |w| of 32 / 6 up to 2**n."""
    parts = weights.float().unflatten(2, (-1, 32))
    exponents = (parts.abs().amax(3).clamp_min(_SMALLEST) / E2M1_MAX).log2().ceil().clamp(-127, 127)
    scaled = parts / torch.exp2(exponents)[..., None]
    steps = torch.tensor(E2M1, device=weights.device)
    nearest = torch.bucketize(scaled.abs(), (steps[1:] + steps[:-1]) / 2)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8).flatten(2)
    return Fp4Weights(codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8))


def dequantize_activations(activations: Activations) -> Tensor:
    """float64 [groups, capacity, channels]."""
    capacity = activations.codes.shape[1]
    scales = activations.scales[..., :capacity].mT.to(torch.float64)
    return activations.codes.to(torch.float64) * scales.repeat_interleave(DEPTH, 2)


def dequantize(weights: Fp8Weights | Fp4Weights) -> Tensor:
    """float64 [groups, rows, channels]."""
    if isinstance(weights, Fp8Weights):
        codes, grain = weights.codes.to(torch.float64), weights.grain
        scales = weights.scales.to(torch.float64) if grain == 128 else e8m0(weights.scales)
        wide = scales.repeat_interleave(grain, 1)[:, : codes.shape[1]].repeat_interleave(grain, 2)
        return codes * wide
    nibbles = torch.stack([weights.codes & 15, weights.codes >> 4], -1).flatten(2).long()
    table = torch.tensor(E2M1 + tuple(-value for value in E2M1), dtype=torch.float64, device=weights.codes.device)
    return table[nibbles] * e8m0(weights.scales).repeat_interleave(32, 2)


def e8m0(codes: Tensor) -> Tensor:
    """2**(code - 127), float64."""
    return torch.ldexp(torch.ones(codes.shape, dtype=torch.float64, device=codes.device), codes.to(torch.int32) - 127)


def check_operands(
    activations: Activations, weights: Fp8Weights | Fp4Weights, counts: Tensor | None, experts: Tensor | None,
    output: Tensor,
) -> None:  # fmt: skip
    """Raises KernelError naming the first operand that no implementation takes."""
    check_activations(activations, counts, experts, weights.codes.shape[0], weights.codes.shape[1], output)
    groups, rows = weights.codes.shape[:2]
    channels, byte = activations.codes.shape[2], torch.uint8
    if isinstance(weights, Fp4Weights):
        expect("weights.codes", weights.codes, byte, (groups, rows, channels // 2))
        expect("weights.scales", weights.scales, byte, (groups, rows, channels // 32))
        return
    grain, dtype = weights.grain, byte if weights.grain == 32 else torch.float32
    expect("weights.codes", weights.codes, torch.float8_e4m3fn, (groups, rows, channels))
    expect("weights.scales", weights.scales, dtype, (groups, -(-rows // grain), channels // grain))


def check_activations(
    activations: Activations, counts: Tensor | None, experts: Tensor | None, weight_groups: int, rows: int,
    output: Tensor,
) -> None:  # fmt: skip
    """Everything but the weights, which have `weight_groups` groups of `rows`. Raises KernelError."""
    groups, capacity, channels = activations.codes.shape
    if channels % DEPTH or rows % 8 or not channels or not rows:
        raise KernelError(f"{rows} rows of {channels} channels", fix="pad rows to 8 and channels to 128")
    if groups != (weight_groups if experts is None else 1) or (experts is not None and counts is not None):
        raise KernelError(f"{groups} groups of tokens for {weight_groups} of weights", fix="give either each its own "
                          "tokens, or all tokens in one group and their experts")  # fmt: skip
    expect("activations.codes", activations.codes, torch.float8_e4m3fn, (groups, capacity, channels))
    scales = (groups, channels // DEPTH, padded_tokens(capacity))
    expect("activations.scales", activations.scales, torch.float32, scales)
    expect("output", output, torch.bfloat16, (groups, capacity, rows))
    if counts is not None:
        expect("counts", counts, torch.int32, (groups,))
    if experts is not None:
        expect("experts", experts, torch.int32, (capacity,))


def expect(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises KernelError unless the tensor is contiguous and of this type and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise KernelError(f"{name} is {found}", fix=f"pass contiguous {dtype} {list(shape)}")
