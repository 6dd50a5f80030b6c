"""Checkpoints in the published formats: DeepSeek's tensor names, FP8 blocks, packed FP4 experts. Knows no training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.nano.quantize import (
    byte_exponents,
    exponent_bytes,
    fp4_codes,
    fp4_pack,
    fp4_unpack,
    fp4_values,
    fp8_pack,
    fp8_unpack,
)

SHARD_BYTES = 12_000_000
FLOAT32 = ("hc_attn_", "hc_ffn_", "hc_head_", "attn_sink", ".ape", "gate.bias")
FP8 = ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b", ".shared_experts.")
INDEX = "model.safetensors.index.json"


def storage_of(name: str) -> str:
    """Format of a tensor by its upstream name: fp4, fp8, int64, float32 or bfloat16."""
    if ".experts." in name:
        return "fp4"
    if "tid2eid" in name:
        return "int64"
    if "compressor" not in name and any(part in name for part in FP8):
        return "fp8"
    return "float32" if any(part in name for part in FLOAT32) else "bfloat16"


def stored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Model weights (experts stacked as `experts.wK.weight` [experts, out, in]) -> upstream tensors."""
    tensors: dict[str, Tensor] = {}
    for name, weight in unstacked(weights):
        storage = storage_of(name)
        if storage == "fp4":
            codes, exponent = fp4_codes(weight)
            tensors[name], tensors[name.removesuffix("weight") + "scale"] = fp4_pack(codes), exponent_bytes(exponent)
        elif storage == "fp8":
            tensors[name], exponent = fp8_pack(weight)
            tensors[name.removesuffix("weight") + "scale"] = exponent_bytes(exponent)
        else:
            tensors[name] = weight.to(getattr(torch, storage))
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


def unstacked(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same weights with one entry per expert."""
    for name, weight in weights.items():
        if ".experts." in name:
            prefix, suffix = name.split(".experts.")
            for expert, matrix in enumerate(weight.unbind(0)):
                yield f"{prefix}.experts.{expert}.{suffix}", matrix
        else:
            yield name, weight


def shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split in order into shards of at most `SHARD_BYTES` of data."""
    split: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room:
            split.append({})
            room = SHARD_BYTES
        split[-1][name] = tensor
        room -= size
    return split


def export(weights: Mapping[str, Tensor], folder: Path) -> int:
    """Write shards and index into `folder`, in place of old ones; returns the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    parts = shards(stored(weights))
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        where |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=0) + "\n")
    return sum(path.stat().st_size for path in folder.glob("model*"))


def read(folder: Path) -> dict[str, Tensor]:
    """Float32 (int64 for tid2eid) weights of a checkpoint, experts stacked. Raises KeyError on a missing scale."""
    raw: dict[str, Tensor] = {}
    files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    for file in files:
        with safe_open(folder / file, framework="pt") as part:
            raw |= {name: part.get_tensor(name) for name in part.keys()}  # noqa: SIM118
    weights = {name: _restored(name, raw) for name in raw if not name.endswith(".scale")}
    return _stacked(weights)


def _restored(name: str, raw: Mapping[str, Tensor]) -> Tensor:
    tensor, storage = raw[name], storage_of(name)
    if storage == "fp4":
        return fp4_values(fp4_unpack(tensor), byte_exponents(raw[name.removesuffix("weight") + "scale"]))
    if storage == "fp8":
        return fp8_unpack(tensor, byte_exponents(raw[name.removesuffix("weight") + "scale"]))
    return tensor if storage == "int64" else tensor.float()


def _stacked(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stacked: dict[str, list[Tensor]] = {}
    result: dict[str, Tensor] = {}
    for name, weight in sorted(weights.items()):
        if ".experts." in name:
            prefix, rest = name.split(".experts.")
            stacked.setdefault(f"{prefix}.experts.{rest.split('.', 1)[1]}", []).append(weight)
        else:
            result[name] = weight
    return result | {name: torch.stack(parts) for name, parts in stacked.items()}
