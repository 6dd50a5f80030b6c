"""A random V3 checkpoint large enough to time: 51 M parameters, bf16, as transformers saves it. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

VOCABULARY = 2048
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.05,  # logits far enough apart that rounding rarely decides a greedy token
}
# transformers leaves them out; others read them.
_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def write_random_v3(folder: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors; returns the folder."""
    torch.manual_seed(seed)
    DeepseekV3ForCausalLM(DeepseekV3Config(**_SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **_ROUTING}
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder
