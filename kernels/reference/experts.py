"""Expert MLPs in torch: each routed expert runs once for the rows that chose it; the shared one runs for all."""

from __future__ import annotations

import torch

from kernels.operands import ExpertBank
from kernels.reference import scaled
from kernels.reference.linear import operand


def experts(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """x [rows, hidden], chosen and weights [rows, topk] -> sum of weight * expert(x), plus the shared expert."""
    if isinstance(bank.gate, scaled.ScaledExperts):
        return scaled.experts(x, chosen, weights, bank)
    out = _expert(x, bank, bank.experts)
    for e in range(bank.experts):
        row, choice = torch.nonzero(chosen == e, as_tuple=True)
        if len(row):
            out.index_add_(0, row, _expert(x[row], bank, e) * weights[row, choice, None])
    return out


def _expert(x: torch.Tensor, bank: ExpertBank, e: int) -> torch.Tensor:
    gate, up, down = (weights.matrix[e].to(torch.float32) for weights in (bank.gate, bank.up, bank.down))
    x = operand(x, bank.gate)
    middle = torch.nn.functional.silu((x @ gate.T).clamp(max=bank.limit)) * (x @ up.T).clamp(-bank.limit, bank.limit)
    return operand(middle, bank.down) @ down.T
