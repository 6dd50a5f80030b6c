"""Sinkhorn normalisation of the mHC mixing matrices, with its gradient. Knows nothing of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sinkhorn_steps(logits: Tensor, iterations: int, eps: float) -> list[Tensor]:
    """logits [..., m, m] float32 -> the matrix after the row softmax and after each of the 2 * iterations - 1
    normalisations that follow (columns, then rows and columns in turn; the last is the result)."""
    steps = [torch.softmax(logits, -1) + eps]
    for number in range(2 * iterations - 1):
        axis = -2 if number % 2 == 0 else -1
        steps.append(steps[-1] / (steps[-1].sum(axis, keepdim=True) + eps))
    return steps


@torch.library.custom_op("nano::sinkhorn", mutates_args=())
def _sinkhorn(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """(result, all steps stacked first)."""
    if logits.is_cuda:
        from models.nano.sinkhorn_kernel import forward_kernel

        return forward_kernel(logits, iterations, eps)
    steps = sinkhorn_steps(logits, iterations, eps)
    return steps[-1].clone(), torch.stack(steps)


@_sinkhorn.register_fake
def _(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logits), logits.new_empty(2 * iterations, *logits.shape)


@torch.library.custom_op("nano::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(gradient: Tensor, steps: Tensor, eps: float) -> Tensor:
    """Gradient of the logits: each division C' = C / s, s = sum(C) + eps, gives dC = (g - sum(g * C')) / s."""
    if gradient.is_cuda:
        from models.nano.sinkhorn_kernel import backward_kernel

        return backward_kernel(gradient, steps, eps)
    for number in range(steps.shape[0] - 1, 0, -1):
        axis = -2 if number % 2 == 1 else -1
        before, after = steps[number - 1], steps[number]
        gradient = (gradient - (gradient * after).sum(axis, keepdim=True)) / (before.sum(axis, keepdim=True) + eps)
    softmax = steps[0] - eps
    return softmax * (gradient - (gradient * softmax).sum(-1, keepdim=True))


@_sinkhorn_backward.register_fake
def _(gradient: Tensor, steps: Tensor, eps: float) -> Tensor:
    return torch.empty_like(gradient)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.eps = inputs[2]


def _backward(ctx: Any, gradient: Tensor, _steps: Tensor) -> tuple[Tensor, None, None]:
    return _sinkhorn_backward(gradient.contiguous(), ctx.saved_tensors[0], ctx.eps), None, None


_sinkhorn.register_autograd(_backward, setup_context=_save)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic [..., m, m] from logits, differentiable: DeepSeek-V4's mHC projection."""
    result: Tensor = _sinkhorn(logits.contiguous(), iterations, eps)[0]
    return result
