"""What loading a checkpoint costs in memory: the peak of one rank's load, and of the engine's, against the weights.

`python -m bench.load [--json PATH]`. A checkpoint of V3's depth, in bf16 and in block FP8, is written to a temporary
folder. Every load runs in a process of its own; its peak is the kernel's high-water mark (mapped file pages included)
since just before the load, less what the process had then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from bench.arguments import Parser, new_file
from bench.table import Row, report
from engine.checkpoint.folder import Folder
from engine.checkpoint.rank import Rank
from engine.checkpoint.ranked import load_rank
from engine.families import open_family
from engine.families.inventory import Wanted, read_model
from engine.families.mla.names import NAMING
from engine.families.mla.tiny import TINY, TinySpec, write_tiny
from engine.inspect.formats import Format, publication, stored
from engine.inspect.parts import part_of_model
from kernels import Ops, choose

MOST = 1.10
DEEP = {  # V3's depth; narrow, as what counts is how small each tensor is beside all of them
    "num_hidden_layers": 61, "first_k_dense_replace": 3, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 64, "intermediate_size": 1024, "moe_intermediate_size": 384, "n_routed_experts": 8,
    "vocab_size": 8192,
}  # fmt: skip
RANKS = {"one rank": (1, 1), "tp 2, ep 4": (2, 4)}
_DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True)
class Cost:
    """One load: bytes held by what was loaded, the most that was held at any time, and seconds."""

    weights: int
    peak: int
    took_s: float

    @property
    def ratio(self) -> float:
        """Peak over weights."""
        return self.peak / self.weights


def write(folder: Path, block: int | None, changes: dict[str, Any]) -> Path:
    """A random V3 checkpoint under upstream names, one shard per layer; `block`: FP8 with fp32 scales."""
    config: dict[str, Any] = {**TINY["v3"], **changes}
    if block:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    model, generator = read_model(config), torch.Generator().manual_seed(0)
    published, layers = publication(config, model.facts), model.facts.layers
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for wanted in model.wanted:
        kind, _ = stored(wanted, part_of_model(wanted.name, layers), published)
        shard = ".".join(wanted.name.split(".")[:2]) if wanted.name.startswith("layers.") else "rest"
        shards.setdefault(shard, {}).update(_tensors(wanted, kind, block, generator))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def _tensors(wanted: Wanted, kind: Format, block: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if kind is Format.FP8 and block:
        codes = torch.randint(0, 0x70, wanted.shape, dtype=torch.uint8, generator=generator)
        scale = torch.full([-(-n // block) for n in wanted.shape], 1e-4)
        return {wanted.name: codes.view(torch.float8_e4m3fn), wanted.name.removesuffix("weight") + "scale": scale}
    values = torch.empty(wanted.shape, dtype=torch.bfloat16).uniform_(-0.1, 0.1, generator=generator)
    return {wanted.name: values}


def measure(folder: Path, loader: str, tensor: int, expert: int) -> Cost:
    """The cost of one load, in a fresh process. Raises CalledProcessError with its output if that fails."""
    command = [sys.executable, "-m", "bench.load", "--measure", str(folder), loader, str(tensor), str(expert)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    return Cost(**json.loads(done.stdout))


def load_here(folder: Path, loader: str, tensor: int, expert: int) -> Cost:
    """Loads in this process and looks at its own memory."""
    ops = choose("cpu")
    _load_tiny(ops)  # what the process itself is made of comes first: compilers and libraries are no weights
    _forget_peak()
    before, began = psutil.Process().memory_info().rss, time.monotonic()
    if loader == "rank":
        loaded = load_rank(Folder(folder), NAMING, Rank(expert - 1, expert, tensor - 1, tensor))
        weights = sum(piece.numel() * piece.element_size() for piece in loaded.values())
        return Cost(weights, _peak() - before, time.monotonic() - began)
    family = open_family(folder, torch.float32, False, ops)
    peak, took_s = _peak() - before, time.monotonic() - began
    held = dict(_buffers(family.weights))  # type: ignore[attr-defined]
    return Cost(sum(held.values()), peak, took_s)


def _load_tiny(ops: Ops) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny(Path(scratch), TinySpec("v3", fp8_block=32))
        open_family(folder, torch.float32, False, ops)
        load_rank(Folder(folder), NAMING, Rank())


def _buffers(value: object) -> Iterable[tuple[int, int]]:
    """Address and bytes of every array and tensor in a tree of dataclasses and tuples."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        yield value.ctypes.data, value.nbytes
    elif isinstance(value, tuple):
        for item in value:
            yield from _buffers(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _buffers(getattr(value, field.name))


def _forget_peak() -> None:
    """Sets the high-water mark to what is held now (Linux: proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def _rows(name: str, cost: Cost) -> Iterable[Row]:
    yield Row(f"{name}: peak over weights", cost.ratio, bar=MOST)
    yield Row("  weights", cost.weights / 1e6, "MB")
    yield Row("  peak", cost.peak / 1e6, "MB")
    yield Row("  time", cost.took_s, "s")


def main(arguments: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="write the table as JSON, too")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        folder, loader, tensor, expert = options.measure
        print(json.dumps(asdict(load_here(Path(folder), loader, int(tensor), int(expert)))))
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, block in (("bf16", None), ("block FP8", 64)):
            folder = write(Path(scratch) / name.replace(" ", "-"), block, DEEP)
            for ranks, (tensor, expert) in RANKS.items():
                rows += _rows(f"{name}, {ranks}, as stored", measure(folder, "rank", tensor, expert))
            rows += _rows(f"{name}, the engine on CPU", measure(folder, "engine", 1, 1))
    return report("Loading a checkpoint of 61 layers", rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
