"""Tiny random V4.1 checkpoints whose every mechanism matters: for tests and measurements. Writes folders, reads none.

A default initialisation hides mistakes (sinks and biases 0, norms 1), so all of them are drawn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from engine.checkpoint.quantize import fp4_quantize, fp8_quantize
from engine.families.v41.config import EngramConfig, V41Config, parse
from engine.families.v41.hashing import EngramHash
from engine.families.v41.normalise import MAP_FILE
from engine.families.v41.schedule import Role
from engine.families.v41.vision import tiny as vision
from engine.families.v41.vision.config import SECTION, parse_vision

_BLOCK = 32
_CLASSES = 400
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "index_n_heads": 32,  # with few heads many scores are exactly 0, and top-k ties differ between implementations
    "index_head_dim": 32,
    "index_topk": 8,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8, 10],
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 5,
    "candidate_block_size": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 3.0,  # low enough to act
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 65536,
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 96,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 4,
    "engram_head_dim": 32,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": _CLASSES,
    "num_nextn_predict_layers": 0,
}


@dataclass(frozen=True, slots=True)
class TinySpec:
    """What to write. `quantized` stores FP8 blocks of 32 x 32 and FP4 experts, as upstream does; vision is not."""

    seed: int = 0
    quantized: bool = False
    sees: bool = True  # with a vision tower
    overrides: tuple[tuple[str, Any], ...] = ()  # values of the text config to replace


def write_tiny(folder: Path, spec: TinySpec = TinySpec()) -> Path:
    """Write config.json, the token map and model.safetensors into `folder` (created); returns it."""
    text = {**TINY, **dict(spec.overrides)}
    classes = np.arange(text["vocab_size"]) % text["engram_compressed_vocab_size"]
    text["engram_num_embeddings"] = [1] * len(text["engram_layer_ids"])
    if engram := parse(text).engram:
        text["engram_num_embeddings"] = list(EngramHash(engram, int(classes[engram.pad_token])).table_rows)
    config: dict[str, Any] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "image_token_id": text["vocab_size"] - 1,
        "text_config": text,
    }
    if spec.sees:
        config[SECTION] = vision.TINY_VISION
    if spec.quantized:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
    tensors = random_tensors(parse(config), spec.seed)
    if spec.quantized:
        tensors = _quantized(tensors)
    if seen := parse_vision(config):
        tensors |= vision.random_tensors(seen, spec.seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / MAP_FILE).write_text(json.dumps({"class_of_token": classes.tolist()}), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def random_tensors(config: V41Config, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the text model under its upstream name: fp32, table rows FP8."""
    draw = _Draw(config, torch.Generator().manual_seed(seed))
    draw.matrix("embed.weight", config.vocab_size, config.hidden)
    draw.matrix("head.weight", config.vocab_size, config.hidden)
    draw.norm("norm.weight", config.hidden)
    for i, role in enumerate(config.schedule.roles):
        draw.layer(i, role)
    return draw.tensors


class _Draw:
    """Draws tensors in a fixed order from one generator."""

    def __init__(self, config: V41Config, generator: torch.Generator) -> None:
        self._config, self._generator = config, generator
        self.tensors: dict[str, torch.Tensor] = {}

    def matrix(self, name: str, *shape: int, spread: float = 0.2) -> None:
        self.tensors[name] = torch.randn(*shape, generator=self._generator) * spread

    def norm(self, name: str, *shape: int) -> None:
        self.tensors[name] = torch.rand(*shape, generator=self._generator) + 0.5

    def layer(self, index: int, role: Role) -> None:
        c, prefix = self._config, f"layers.{index}"
        for site in ("attn", "ffn"):
            self.norm(f"{prefix}.{site}_norm.weight", c.hidden)
            self._hyper(f"{prefix}.hc_{site}")
        self._attention(f"{prefix}.attn")
        if role.source == index:
            self._source(f"{prefix}.attn", role.ratio)
        if role.ratio and role.chooser == index:
            self.matrix(f"{prefix}.attn.indexer.wq_b.weight", c.index_heads * c.index_dim, c.query_rank)
            self.matrix(f"{prefix}.attn.indexer.weights_proj.weight", c.index_heads, c.hidden)
        if c.engram and index in c.engram.layers:
            self._engram(f"{prefix}.engram", c.engram, c.engram.rows[c.engram.layers.index(index)])
        self._experts(f"{prefix}.ffn")

    def _hyper(self, prefix: str) -> None:
        m = self._config.streams
        self.matrix(f"{prefix}_fn", (2 + m) * m, m * self._config.hidden, spread=0.05)
        self.matrix(f"{prefix}_base", (2 + m) * m)
        self.tensors[f"{prefix}_scale"] = 1 + 0.1 * torch.randn(3, generator=self._generator)

    def _attention(self, prefix: str) -> None:
        c = self._config
        inner = c.heads * c.head_dim // c.output_groups
        self.matrix(f"{prefix}.wq_a.weight", c.query_rank, c.hidden)
        self.matrix(f"{prefix}.wq_b.weight", c.heads * c.head_dim, c.query_rank)
        self.matrix(f"{prefix}.wkv.weight", c.head_dim, c.hidden)
        self.matrix(f"{prefix}.wo_a.weight", c.output_groups * c.output_rank, inner)
        self.matrix(f"{prefix}.wo_b.weight", c.hidden, c.output_groups * c.output_rank)
        self.norm(f"{prefix}.q_norm.weight", c.query_rank)
        self.norm(f"{prefix}.kv_norm.weight", c.head_dim)
        self.matrix(f"{prefix}.attn_sink", c.heads, spread=1.0)

    def _source(self, prefix: str, ratio: int) -> None:
        c = self._config
        for part in ("wkv", "wgate") if ratio > 1 else ("wkv",):
            self.matrix(f"{prefix}.compressor.{part}.weight", c.head_dim, c.hidden)
        self.norm(f"{prefix}.compressor.norm.weight", c.head_dim)
        self.matrix(f"{prefix}.indexer.wk.weight", c.index_dim, c.head_dim)
        self.norm(f"{prefix}.indexer.k_norm.weight", c.index_dim)

    def _engram(self, prefix: str, engram: EngramConfig, rows: int) -> None:
        c = self._config
        table = torch.randn(rows, engram.width, generator=self._generator)
        packed, scale = fp8_quantize(table, (1, min(_BLOCK, engram.width)))
        self.tensors[f"{prefix}.embed.weight"] = packed
        self.tensors[f"{prefix}.embed.scale"] = scale.view(torch.float8_e8m0fnu)
        self.matrix(f"{prefix}.wkv.weight", (c.streams + 1) * c.hidden, engram.columns * engram.width, spread=0.1)
        self.norm(f"{prefix}.q_weight", c.streams, c.hidden)
        self.norm(f"{prefix}.k_weight", c.streams, c.hidden)

    def _experts(self, prefix: str) -> None:
        c = self._config
        self.matrix(f"{prefix}.gate.weight", c.experts, c.hidden)
        for bias in ("bias", "bias_vl"):
            self.matrix(f"{prefix}.gate.{bias}", c.experts, spread=0.1)
        for expert in [*(f"experts.{e}" for e in range(c.experts)), "shared_experts"]:
            self.matrix(f"{prefix}.{expert}.w1.weight", c.expert_inner, c.hidden)
            self.matrix(f"{prefix}.{expert}.w3.weight", c.expert_inner, c.hidden)
            self.matrix(f"{prefix}.{expert}.w2.weight", c.hidden, c.expert_inner)


def _quantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model in the published formats: packed FP4 experts, FP8 projections, bf16 for the other matrices."""
    fp8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if tensor.dtype != torch.float32 or tensor.dim() != 2 or parts[-1] != "weight":
            out[name] = tensor
        elif parts[-2] not in fp8 or "compressor" in parts:
            out[name] = tensor.to(torch.bfloat16)
        else:
            packed, scale = fp4_quantize(tensor) if "experts" in parts else fp8_quantize(tensor, (_BLOCK, _BLOCK))
            out[name] = packed.view(torch.int8) if packed.dtype == torch.uint8 else packed
            out[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
    return out


def _write(folder: Path, seed: int, quantized: bool) -> Path:
    return write_tiny(folder, TinySpec(seed=seed, quantized=quantized))


WRITERS = {"v41": _write}
