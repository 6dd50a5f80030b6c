"""A served checkpoint as transformers loads it: dequantized, under the names it saves. For comparisons only."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.checkpoint.folder import Folder
from engine.checkpoint.formats import fp4_packed, fp8_blocks
from engine.checkpoint.tensors import read

_QUANTIZED = ("quantization_config", "expert_dtype")
_RENAMED = (("hc_head_", "hc_head.hc_"), (".attn.kv_norm.", ".attn.norm."), ("embed.weight", "embed_tokens.weight"))


def open_reference(model_dir: Path, folder: Path) -> PreTrainedModel:
    """transformers' model, fp32, of the weights in `model_dir`; a dequantized copy is written to `folder`."""
    write_dequantized(model_dir, folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def write_dequantized(model_dir: Path, folder: Path) -> None:
    """Write config.json and model.safetensors, every quantized weight as fp32."""
    source = Folder(model_dir)
    config = {key: value for key, value in source.config.items() if key not in _QUANTIZED}
    block = tuple((source.config.get("quantization_config") or {}).get("weight_block_size", ()))
    tensors = {_saved_name(name): _plain(source, name, block) for name in source.names if not name.endswith(".scale")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _plain(source: Folder, name: str, block: tuple[int, ...]) -> torch.Tensor:
    weight, scale = read(source, name), name.removesuffix(".weight") + ".scale"
    if scale in source.names:
        if source.stored(name) == "F8_E4M3":
            return fp8_blocks(weight, read(source, scale), (block[0], block[1]))
        return fp4_packed(weight, read(source, scale))
    return weight.to(torch.float32) if weight.is_floating_point() else weight


def _saved_name(name: str) -> str:
    if name.startswith(("model.", "head.")):
        return name
    for upstream, saved in _RENAMED:
        name = name.replace(upstream, saved)
    return f"model.{name}"
