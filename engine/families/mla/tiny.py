"""Tiny random V2, V3 and V3.2 checkpoints whose every mechanism matters: for tests and parity runs. Reads no folder.

A default initialisation hides mistakes (norms 1, routing bias 0, logits too small), so all of them are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.checkpoint.quantize import fp8_quantize
from engine.errors import InvalidParameter
from engine.families.mla.config import MlaConfig, parse

_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1}
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_V2 = {
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 4.0,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}
_V3 = {
    "q_lora_rank": 48,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
# With few index heads many scores are exactly 0, and top-k ties differ between implementations.
_V32 = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 16}
TINY: dict[str, dict[str, Any]] = {
    "v2": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **_COMMON, **_V2},
    "v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_COMMON, **_V3},
    "v32": {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **_COMMON, **_V3, **_V32},
}
_BLOCK = 16  # divides every width, which transformers' reader of FP8 needs
_PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "eh_proj", "weights_proj", "head")


@dataclass(frozen=True, slots=True)
class TinySpec:
    """Which checkpoint to write. `fp8_block`: linear weights as FP8 in blocks of this size; `exponent_scales`: E8M0."""

    family: str = "v3"
    seed: int = 0
    changes: dict[str, Any] = field(default_factory=dict)
    fp8_block: int | None = None
    exponent_scales: bool = False


def write_tiny(folder: Path, spec: TinySpec) -> Path:
    """Write config.json and model.safetensors under upstream names; returns the folder."""
    config = {**TINY[spec.family], **spec.changes}
    tensors = random_tensors(parse(config), spec.seed)
    if spec.fp8_block:
        block = spec.fp8_block
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
        tensors = _quantized(tensors, block, spec.exponent_scales)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def random_tensors(config: MlaConfig, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the model under its upstream name, fp32."""
    draw = _Draw(config, torch.Generator().manual_seed(seed))
    draw.matrix("model.embed_tokens", config.vocab_size, config.hidden)
    draw.matrix("lm_head", config.vocab_size, config.hidden)
    draw.norm("model.norm", config.hidden)
    for i, dense in enumerate(config.dense):
        draw.layer(f"model.layers.{i}", dense)
    for i in range(config.mtp_layers):
        prefix = f"model.layers.{len(config.dense) + i}"
        draw.layer(prefix, False)
        draw.matrix(f"{prefix}.eh_proj", config.hidden, 2 * config.hidden)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            draw.norm(f"{prefix}.{name}", config.hidden)
        draw.tensors[f"{prefix}.embed_tokens.weight"] = draw.tensors["model.embed_tokens.weight"].clone()
        draw.tensors[f"{prefix}.shared_head.head.weight"] = draw.tensors["lm_head.weight"].clone()
    return draw.tensors


class _Draw:
    """Draws tensors in a fixed order from one generator."""

    def __init__(self, config: MlaConfig, generator: torch.Generator) -> None:
        self._config, self._generator = config, generator
        self.tensors: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, *shape: int) -> None:
        self.tensors[f"{name}.weight"] = torch.randn(*shape, generator=self._generator) * 0.2

    def norm(self, name: str, width: int) -> None:
        self.tensors[f"{name}.weight"] = torch.rand(width, generator=self._generator) + 0.5

    def layer(self, prefix: str, dense: bool) -> None:
        c = self._config
        self.norm(f"{prefix}.input_layernorm", c.hidden)
        self.norm(f"{prefix}.post_attention_layernorm", c.hidden)
        self._attention(f"{prefix}.self_attn")
        if dense:
            self._mlp(f"{prefix}.mlp", c.dense_inner)
            return
        self.matrix(f"{prefix}.mlp.gate", c.experts, c.hidden)
        if c.routing.sigmoid:
            bias = torch.randn(c.experts, generator=self._generator) * 0.1
            self.tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = bias
        for e in range(c.experts):
            self._mlp(f"{prefix}.mlp.experts.{e}", c.expert_inner)
        self._mlp(f"{prefix}.mlp.shared_experts", c.expert_inner * c.shared_experts)

    def _attention(self, attn: str) -> None:
        c = self._config
        outputs = c.heads * (c.nope + c.rope)
        if c.query_rank is None:
            self.matrix(f"{attn}.q_proj", outputs, c.hidden)
        else:
            self.matrix(f"{attn}.q_a_proj", c.query_rank, c.hidden)
            self.norm(f"{attn}.q_a_layernorm", c.query_rank)
            self.matrix(f"{attn}.q_b_proj", outputs, c.query_rank)
        self.matrix(f"{attn}.kv_a_proj_with_mqa", c.latent_rank + c.rope, c.hidden)
        self.norm(f"{attn}.kv_a_layernorm", c.latent_rank)
        self.matrix(f"{attn}.kv_b_proj", c.heads * (c.nope + c.value), c.latent_rank)
        self.matrix(f"{attn}.o_proj", c.hidden, c.heads * c.value)
        if c.index is not None and c.query_rank is not None:
            self.matrix(f"{attn}.indexer.wq_b", c.index.heads * c.index.width, c.query_rank)
            self.matrix(f"{attn}.indexer.wk", c.index.width, c.hidden)
            self.matrix(f"{attn}.indexer.weights_proj", c.index.heads, c.hidden)
            self.norm(f"{attn}.indexer.k_norm", c.index.width)
            bias = torch.randn(c.index.width, generator=self._generator) * 0.2
            self.tensors[f"{attn}.indexer.k_norm.bias"] = bias

    def _mlp(self, prefix: str, inner: int) -> None:
        for name in ("gate_proj", "up_proj"):
            self.matrix(f"{prefix}.{name}", inner, self._config.hidden)
        self.matrix(f"{prefix}.down_proj", self._config.hidden, inner)


def _quantized(tensors: dict[str, torch.Tensor], block: int, exponent_scales: bool) -> dict[str, torch.Tensor]:
    """The same model with its projections as FP8, `weight_scale_inv` beside each; the rest stays as it is."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or any(part in name for part in _PLAIN):
            out[name] = tensor
            continue
        out[name], scale = fp8_quantize(tensor, (block, block))
        exponents = scale.view(torch.float8_e8m0fnu)
        out[f"{name}_scale_inv"] = exponents if exponent_scales else exponents.to(torch.float32) * 0.9
    return out


def _writer(family: str) -> Callable[[Path, int, bool], Path]:
    def write(folder: Path, seed: int, quantized: bool) -> Path:
        if quantized and family == "v2":
            raise InvalidParameter("quantized", "V2 was published in bf16 alone", "leave --quantized out, or take v3")
        block = _BLOCK if quantized else None
        return write_tiny(folder, TinySpec(family, seed, fp8_block=block, exponent_scales=False))

    return write


WRITERS = {family: _writer(family) for family in TINY}
