"""Initial weights of nano. Seeded; knows parameter names."""

from __future__ import annotations

import torch
from torch import Tensor

from models.nano.config import NanoConfig
from models.nano.model import Nano

STREAM_KEPT = 3.0
COEFFICIENT_SCALE = 0.1


def hash_routes(config: NanoConfig, generator: torch.Generator) -> Tensor:
    """[vocabulary, chosen] int64: distinct experts per token id, every expert equally often."""
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    order = torch.randperm(config.vocab_size, generator=generator)
    step = 1 + torch.randint(0, experts // chosen, (config.vocab_size, 1), generator=generator)
    return (order[:, None] % experts + step * torch.arange(chosen)) % experts


def _site_base(config: NanoConfig, number: int) -> Tensor:
    """Reads one stream more than the others, writes to all, and mostly keeps streams apart."""
    m = config.hc_mult
    pre = torch.full((m,), -1.0)
    pre[number % m] = 1.0
    return torch.cat((pre, torch.zeros(m), STREAM_KEPT * torch.eye(m).flatten()))


@torch.no_grad()
def initialise(model: Nano, seed: int) -> None:
    """Fill every parameter and routing table in place (on the CPU)."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    for name, weight in model.named_parameters():
        if name.endswith(("fn",)) and "hc_" in name:
            weight.normal_(0, 0.02, generator=generator)
        elif name.endswith("hc_head_scale") or "_scale" in name:
            weight.fill_(COEFFICIENT_SCALE)
        elif weight.dim() >= 2 and not name.endswith("ape"):
            std = 0.5 if name.startswith("embed") else weight.shape[-1] ** -0.5
            weight.normal_(0, std, generator=generator)
    for number, layer in enumerate(model.blocks()):
        layer.get_parameter("hc_attn_base").copy_(_site_base(config, 2 * number))
        layer.get_parameter("hc_ffn_base").copy_(_site_base(config, 2 * number + 1))
        layer.attn.wo_b.weight.mul_(0.3)
        layer.ffn.experts.w2.weight.mul_(0.3)
        layer.ffn.shared_experts.w2.weight.mul_(0.3)
        if layer.ffn.gate.hashed:
            layer.ffn.gate.tid2eid.copy_(hash_routes(config, generator))
    model.head.weight.mul_(0.5)
