"""Muon for matrices, AdamW for the rest, over float32 masters; the model itself always holds the stored values.

After each step the model's parameters are the masters rounded to their storage format, so gradients are taken at what
will be exported (straight-through quantization-aware training) and the model code knows nothing of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.nano.export import storage_of
from models.nano.quantize import fp4_round, fp8_round

ORTHOGONAL = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz coefficients of the Muon publication
MUON_RMS = 0.2  # makes an update as large as AdamW's (Moonlight report)
MATRICES = ("wq_a", "wq_b", "wkv", "wgate", "wo_a", "wo_b", "experts.w")


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates and decay at full schedule."""

    matrix: float = 4e-3
    table: float = 3e-3
    coefficient: float = 1.5e-3
    decay: float = 0.03
    momentum: float = 0.95


def orthogonalised(update: Tensor, steps: int = 5) -> Tensor:
    """[..., rows, columns] -> nearest semi-orthogonal matrices (bfloat16 arithmetic on a GPU)."""
    a, b, c = ORTHOGONAL
    x = update.bfloat16() if update.is_cuda else update.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def rounded(master: Tensor, storage: str, quantize: bool) -> Tensor:
    """The master in its storage format; without `quantize`, FP8 and FP4 matrices are only rounded to bfloat16."""
    if storage == "float32":
        return master
    if quantize and storage == "fp4":
        return fp4_round(master)
    if quantize and storage == "fp8":
        return fp8_round(master)
    return master.bfloat16().float()


def is_matrix(name: str) -> bool:
    return any(f".{part}" in name for part in MATRICES) or ".shared_experts.w" in name


class Group:
    """Matrices of one shape and storage, stacked, with their Muon state."""

    def __init__(self, parameters: list[nn.Parameter], storage: str) -> None:
        self.parameters, self.storage = parameters, storage
        self.master = torch.stack([parameter.detach().float() for parameter in parameters])
        self.momentum = torch.zeros_like(self.master)

    def step(self, rates: Rates, factor: float) -> None:
        gradient = torch.stack([_gradient(parameter) for parameter in self.parameters]).float()
        self.momentum.lerp_(gradient, 1 - rates.momentum)
        update = orthogonalised(gradient.lerp(self.momentum, rates.momentum)).float()
        rate = rates.matrix * factor
        self.master.mul_(1 - rate * rates.decay)
        self.master.add_(update, alpha=-rate * MUON_RMS * max(self.master.shape[-2:]) ** 0.5)

    def publish(self, quantize: bool) -> None:
        values = rounded(self.master, self.storage, quantize).unbind(0)
        torch._foreach_copy_([parameter.data for parameter in self.parameters], list(values))


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class Optimizer:
    """Masters, states and the step of every parameter of a model."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        self.rates = rates
        matrices: dict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
        others: dict[bool, list[Tensor]] = {True: [], False: []}
        self._others: list[tuple[nn.Parameter, Tensor, str]] = []
        for name, parameter in model.named_parameters():
            if is_matrix(name):
                matrices[(storage_of(name), *parameter.shape)].append(parameter)
            else:
                master = parameter.detach().float().clone()
                self._others.append((parameter, master, storage_of(name)))
                others[name.startswith(("embed", "head"))].append(master)
        self.groups = [Group(members, key[0]) for key, members in matrices.items()]
        settings = [
            {"params": others[True], "rate": rates.table, "weight_decay": 0.0},
            {"params": others[False], "rate": rates.coefficient, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(settings, lr=1e-3, betas=(0.9, 0.97), fused=self._others[0][1].is_cuda)

    @torch.no_grad()
    def step(self, factor: float, quantize: bool) -> None:
        """One update at `factor` of the full rates, then publish rounded values to the model."""
        for group in self.groups:
            group.step(self.rates, factor)
        for parameter, master, _ in self._others:
            master.grad = _gradient(parameter).float()
        for setting in self._adam.param_groups:
            setting["lr"] = setting["rate"] * factor
        self._adam.step()
        self.publish(quantize)

    @torch.no_grad()
    def publish(self, quantize: bool) -> None:
        """Copy rounded masters into the model and forget gradients."""
        for group in self.groups:
            group.publish(quantize)
        for parameter, master, storage in self._others:
            parameter.copy_(rounded(master, storage, quantize))
            parameter.grad = None
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {
            "groups": [(group.master, group.momentum) for group in self.groups],
            "others": [master for _, master, _ in self._others],
            "adam": self._adam.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Inverse of `state`, for the same model."""
        for group, (master, momentum) in zip(self.groups, state["groups"], strict=True):
            group.master.copy_(master)
            group.momentum.copy_(momentum)
        for (_, master, _), saved in zip(self._others, state["others"], strict=True):
            master.copy_(saved)
        self._adam.load_state_dict(state["adam"])
