"""Expert choice within groups in torch, as DeepSeek-V2 and V3 do it. Knows no expert's weights."""

from __future__ import annotations

import torch

from kernels.operands import GroupRouterSpec
from kernels.reference.linear import linear


def route_groups(x: torch.Tensor, spec: GroupRouterSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, hidden] -> experts int32 [rows, topk + always], weights fp32 [rows, topk + always].

    Groups are ranked by the sum of their `group_best` best biased scores; the weights are the unbiased scores of the
    best experts in the kept groups. The lower group and the lower expert win a tie.
    """
    logits = linear(x, spec.gate)
    scores = logits.sigmoid() if spec.sigmoid else logits.softmax(-1)
    biased = scores if spec.bias is None else scores + spec.bias
    grouped = biased.unflatten(1, (spec.groups, -1))
    ranked = grouped.topk(spec.group_best, -1).values.sum(-1)
    kept = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : spec.kept_groups]
    hidden = torch.ones_like(ranked, dtype=torch.bool).scatter_(1, kept, False)
    masked = grouped.masked_fill(hidden[..., None], -torch.inf).flatten(1)
    chosen = torch.sort(masked, dim=-1, descending=True, stable=True).indices[:, : spec.topk]
    weights = scores.gather(1, chosen)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    always = torch.arange(spec.experts, spec.experts + spec.always, device=x.device).expand(len(x), -1)
    weights = torch.cat([weights * spec.scaling, x.new_ones(len(x), spec.always)], 1)
    return torch.cat([chosen, always], 1).to(torch.int32), weights
