"""Sinkhorn on 4 x 4 matrices as two Triton kernels, one matrix a lane group. Imported only where CUDA is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MATRICES = 64


@triton.jit
def _forward(logits, result, steps, count, eps, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    which = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, 4)
    place = which[:, None, None] * 16 + row[None, :, None] * 4 + row[None, None, :]
    inside = (which < count)[:, None, None]
    z = tl.load(logits + place, mask=inside, other=0.0)
    z = tl.exp(z - tl.max(z, axis=2, keep_dims=True))
    c = z / tl.sum(z, axis=2, keep_dims=True) + eps
    tl.store(steps + place, c, mask=inside)
    for pair in range(NUMBER // 2):
        c = c / (tl.sum(c, axis=1, keep_dims=True) + eps)
        tl.store(steps + (2 * pair + 1) * count * 16 + place, c, mask=inside)
        if pair < NUMBER // 2 - 1:
            c = c / (tl.sum(c, axis=2, keep_dims=True) + eps)
            tl.store(steps + (2 * pair + 2) * count * 16 + place, c, mask=inside)
    tl.store(result + place, c, mask=inside)


@triton.jit
def _backward(gradient, steps, out, count, eps, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    which = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, 4)
    place = which[:, None, None] * 16 + row[None, :, None] * 4 + row[None, None, :]
    inside = (which < count)[:, None, None]
    g = tl.load(gradient + place, mask=inside, other=0.0)
    after = tl.load(steps + (NUMBER - 1) * count * 16 + place, mask=inside, other=1.0)
    for back in range(NUMBER // 2):
        number = NUMBER - 1 - 2 * back
        before = tl.load(steps + (number - 1) * count * 16 + place, mask=inside, other=1.0)
        g = (g - tl.sum(g * after, axis=1, keep_dims=True)) / (tl.sum(before, axis=1, keep_dims=True) + eps)
        after = before
        if number > 1:
            before = tl.load(steps + (number - 2) * count * 16 + place, mask=inside, other=1.0)
            g = (g - tl.sum(g * after, axis=2, keep_dims=True)) / (tl.sum(before, axis=2, keep_dims=True) + eps)
            after = before
    softmax = after - eps
    g = softmax * (g - tl.sum(g * softmax, axis=2, keep_dims=True))
    tl.store(out + place, g, mask=inside)


def forward_kernel(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """logits [..., 4, 4] contiguous float32 -> (result, steps [2 * iterations, ..., 4, 4])."""
    count, number = logits.numel() // 16, 2 * iterations
    result, steps = torch.empty_like(logits), logits.new_empty(number, *logits.shape)
    _forward[(triton.cdiv(count, MATRICES),)](logits, result, steps, count, eps, NUMBER=number, BLOCK=MATRICES)
    return result, steps


def backward_kernel(gradient: Tensor, steps: Tensor, eps: float) -> Tensor:
    """Gradient of the logits from the gradient of the result."""
    count, out = gradient.numel() // 16, torch.empty_like(gradient)
    grid = (triton.cdiv(count, MATRICES),)
    _backward[grid](gradient, steps, out, count, eps, NUMBER=steps.shape[0], BLOCK=MATRICES)
    return out
