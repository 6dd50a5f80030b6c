"""A random V2-Lite-shaped model of 16 B parameters, made on the device and never written, and its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from engine.families.mla.build import build
from engine.families.mla.config import MlaConfig, parse
from engine.families.mla.model import Mla
from engine.families.mla.options import Options
from kernels import Ops

# DeepSeek-V2-Lite's published config.json, without its rotary scaling: context 4,096 needs none.
SHAPE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


class RandomReader:
    """Stands in for a checkpoint's reader: every tensor is drawn from one generator, matrices scaled to keep norms."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator, self._device = torch.Generator(device).manual_seed(seed), device
        self._asked: Counter[str] = Counter()

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        """fp32: norms are ones, matrices [out, in] have variance 1 / in."""
        self._asked[name] += 1
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        drawn = torch.randn(shape, generator=self._generator, device=self._device)
        return drawn.mul_(shape[-1] ** -0.5)

    def stack(self, names: Sequence[str], *shape: int, then: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """bf16 [len(names) + len(then), *shape]."""
        stacked = torch.empty(len(names) + len(then), *shape, dtype=torch.bfloat16, device=self._device)
        for i, name in enumerate(names):
            stacked[i] = self.floats(name, *shape)
        for i, weight in enumerate(then, len(names)):
            stacked[i] = weight
        return stacked

    def has(self, prefix: str) -> bool:
        """No part beyond the layers."""
        return False

    def finish(self) -> None:
        """Raises ValueError where a name was asked for twice: it was drawn twice, and is no longer one tensor."""
        twice = sorted(name for name, times in self._asked.items() if times > 1)
        if twice:
            raise ValueError(f"drawn more than once: {', '.join(twice)}")


def random_model(ops: Ops, seed: int, layers: int | None = None, block_tokens: int = 64) -> Mla:
    """The model in bf16 on the operators' device. `layers`: fewer of them, for a look."""
    config = parse(SHAPE if layers is None else {**SHAPE, "num_hidden_layers": layers})
    reader = RandomReader(seed, ops.device)
    weights = build(reader, config, ops, torch.bfloat16, True)  # type: ignore[arg-type]  # reads as a Reader does
    return Mla(config, Options(), weights, torch.bfloat16, ops, block_tokens, not ops.records)


def weights_met(config: MlaConfig, experts: float) -> float:
    """Numbers in the matrices that one step multiplies with when `experts` routed experts of each layer are chosen."""
    queries = config.hidden * config.heads * (config.nope + config.rope)
    latent = config.hidden * (config.latent_rank + config.rope)
    heads = config.heads * (config.latent_rank * (config.nope + config.value) + config.value * config.hidden)
    mlp = 3 * config.hidden * config.expert_inner * (experts + config.shared_experts) + config.experts * config.hidden
    dense = sum(config.dense)
    layers = len(config.dense) * (queries + latent + heads) + (len(config.dense) - dense) * mlp
    return layers + dense * 3 * config.hidden * config.dense_inner + config.vocab_size * config.hidden
