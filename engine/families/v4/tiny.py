"""Tiny random V4 checkpoints whose every mechanism matters: for tests and parity runs. Writes folders, reads none.

A default initialisation hides mistakes (sinks and biases 0, norms 1, every hash to expert 0), so all of them are drawn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.checkpoint.quantize import fp4_quantize, fp8_quantize
from engine.families.v4.config import V4Config, parse

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "index_n_heads": 16,  # with few heads many scores are exactly 0, and top-k ties differ between implementations
    "index_head_dim": 32,
    "index_topk": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
}
_RATIOS = [0, 0, 4, 16, 4, 16, 4]
_YARN = {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1}
_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 16: "heavily_compressed_attention"}
UPSTREAM_KEYS = {
    "compress_ratios": _RATIOS,
    "num_hash_layers": 2,
    "qk_rope_head_dim": 16,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", **_YARN},
}
TRANSFORMERS_KEYS = {
    "layer_types": [_TYPES[ratio] for ratio in _RATIOS],
    "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 5,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "yarn", **_YARN},
}
_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")


@dataclass(frozen=True, slots=True)
class TinySpec:
    """What to write. `quantized` stores FP8 blocks of 48 (ragged on purpose) and FP4 experts, as upstream does."""

    seed: int = 0
    upstream: bool = False  # config keys and tensor names: upstream's, or those transformers saves
    quantized: bool = False
    mtp_layers: int = 0
    overrides: tuple[tuple[str, Any], ...] = ()  # config values to replace


def write_tiny(folder: Path, spec: TinySpec = TinySpec()) -> Path:
    """Write config.json and model.safetensors into `folder` (created); returns it."""
    config = {**TINY, **(UPSTREAM_KEYS if spec.upstream else TRANSFORMERS_KEYS), **dict(spec.overrides)}
    config["num_nextn_predict_layers"] = spec.mtp_layers
    if spec.upstream and spec.mtp_layers:
        config["compress_ratios"] = [*config["compress_ratios"], *[0] * spec.mtp_layers]
    if spec.quantized:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]}
    tensors = random_tensors(parse(config), spec.seed)
    if spec.quantized:
        tensors = _quantized(tensors)
    if not spec.upstream:
        tensors = {_saved_name(name): tensor for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def random_tensors(config: V4Config, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the model under its upstream name, fp32 (tid2eid: int64)."""
    draw = _Draw(config, torch.Generator().manual_seed(seed))
    draw.matrix("embed.weight", config.vocab_size, config.hidden)
    draw.matrix("head.weight", config.vocab_size, config.hidden)
    draw.norm("norm.weight", config.hidden)
    draw.hyper("hc_head", config.streams, 1)
    for i, kind in enumerate(config.layers):
        rate = config.rate(kind)
        draw.layer(f"layers.{i}", rate, rate == config.csa_rate, config.hashed[i])
    for i in range(config.mtp_layers):
        draw.layer(f"mtp.{i}", 0, False, False)
        for name in ("e_proj", "h_proj"):
            draw.matrix(f"mtp.{i}.{name}.weight", config.hidden, config.hidden)
        for name in ("enorm", "hnorm", "norm"):
            draw.norm(f"mtp.{i}.{name}.weight", config.hidden)
        draw.hyper(f"mtp.{i}.hc_head", config.streams, 1)
    return draw.tensors


class _Draw:
    """Draws tensors in a fixed order from one generator."""

    def __init__(self, config: V4Config, generator: torch.Generator) -> None:
        self._config, self._generator = config, generator
        self.tensors: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, *shape: int, spread: float = 0.2) -> None:
        self.tensors[name] = torch.randn(*shape, generator=self._generator) * spread

    def norm(self, name: str, width: int) -> None:
        self.tensors[name] = torch.rand(width, generator=self._generator) + 0.5

    def hyper(self, prefix: str, outputs: int, scales: int) -> None:
        self.matrix(f"{prefix}_fn", outputs, self._config.streams * self._config.hidden, spread=0.05)
        self.matrix(f"{prefix}_base", outputs)
        self.tensors[f"{prefix}_scale"] = 1 + 0.1 * torch.randn(scales, generator=self._generator)

    def layer(self, prefix: str, rate: int, overlap: bool, hashed: bool) -> None:
        c = self._config
        for site in ("attn", "ffn"):
            self.norm(f"{prefix}.{site}_norm.weight", c.hidden)
            self.hyper(f"{prefix}.hc_{site}", (2 + c.streams) * c.streams, 3)
        attn = f"{prefix}.attn"
        self.matrix(f"{attn}.wq_a.weight", c.query_rank, c.hidden)
        self.matrix(f"{attn}.wq_b.weight", c.heads * c.head_dim, c.query_rank)
        self.matrix(f"{attn}.wkv.weight", c.head_dim, c.hidden)
        inner = c.heads * c.head_dim // c.output_groups
        self.matrix(f"{attn}.wo_a.weight", c.output_groups * c.output_rank, inner)
        self.matrix(f"{attn}.wo_b.weight", c.hidden, c.output_groups * c.output_rank)
        self.norm(f"{attn}.q_norm.weight", c.query_rank)
        self.norm(f"{attn}.kv_norm.weight", c.head_dim)
        self.matrix(f"{attn}.attn_sink", c.heads, spread=1.0)
        if rate:
            self._compressor(f"{attn}.compressor", rate, c.head_dim, overlap)
        if overlap:
            self._compressor(f"{attn}.indexer.compressor", rate, c.index_dim, True)
            self.matrix(f"{attn}.indexer.wq_b.weight", c.index_heads * c.index_dim, c.query_rank)
            self.matrix(f"{attn}.indexer.weights_proj.weight", c.index_heads, c.hidden)
        self._moe(f"{prefix}.ffn", hashed)

    def _compressor(self, prefix: str, rate: int, width: int, overlap: bool) -> None:
        outputs = width * (2 if overlap else 1)
        self.matrix(f"{prefix}.ape", rate, outputs, spread=1.0)
        self.norm(f"{prefix}.norm.weight", width)
        self.matrix(f"{prefix}.wkv.weight", outputs, self._config.hidden)
        self.matrix(f"{prefix}.wgate.weight", outputs, self._config.hidden)

    def _moe(self, prefix: str, hashed: bool) -> None:
        c = self._config
        self.matrix(f"{prefix}.gate.weight", c.experts, c.hidden)
        if hashed:
            order = torch.rand(c.vocab_size, c.experts, generator=self._generator).argsort(1)
            self.tensors[f"{prefix}.gate.tid2eid"] = order[:, : c.experts_per_token].contiguous()
        else:
            self.matrix(f"{prefix}.gate.bias", c.experts, spread=0.1)
        for expert in [*(f"experts.{e}" for e in range(c.experts)), "shared_experts"]:
            self.matrix(f"{prefix}.{expert}.w1.weight", c.expert_inner, c.hidden)
            self.matrix(f"{prefix}.{expert}.w3.weight", c.expert_inner, c.hidden)
            self.matrix(f"{prefix}.{expert}.w2.weight", c.hidden, c.expert_inner)


def _quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model in V4's published formats: packed FP4 experts, FP8 projections, bf16 for the other matrices."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[-1] != "weight" or (parts[-2] not in _FP8) or "compressor" in parts:
            keep = tensor.dim() != 2 or not name.endswith(".weight")
            out[name] = tensor if keep else tensor.to(torch.bfloat16)
            continue
        packed, scale = fp4_quantize(tensor) if "experts" in parts else fp8_quantize(tensor, (48, 48))
        out[name] = packed.view(torch.int8) if packed.dtype == torch.uint8 else packed
        out[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
    return out


def _saved_name(name: str) -> str:
    """The name transformers saves an upstream tensor under (see names.py for the way back)."""
    if name == "head.weight":
        return name
    if name == "embed.weight":
        return "model.embed_tokens.weight"
    return "model." + name.replace("hc_head_", "hc_head.hc_").replace(".attn.kv_norm.", ".attn.norm.")


def _write(folder: Path, seed: int, quantized: bool) -> Path:
    return write_tiny(folder, TinySpec(seed=seed, upstream=True, quantized=quantized))


WRITERS = {"v4": _write}
