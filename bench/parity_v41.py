"""V4.1 against recorded outputs of its reference, which transformers does not have yet. Computes no reference.

A part ships with the repository; the rest is read from a folder of fixtures where one is given or lies beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.parity_prefix import BAR, CONTROL_BAR, prefix_rows
from bench.parity_run import BLOCK_TOKENS, difference, fresh, open_tiny, run
from bench.parity_v41_published import SHIPPED, engram_rows, format_rows, image_rows, published_rows
from bench.parity_v41_replay import replay_rows
from bench.parity_v41_trace import trace_rows
from bench.parity_v41_vision import prompt_rows, vision_rows
from bench.table import Row
from engine.checkpoint.folder import Folder
from engine.families.v41.model import V41, load
from kernels import choose

BESIDE = Path(__file__).parents[2] / "shared" / "spec" / "fixtures"
QUANTIZED_BAR = 2e-2
BOUNDARIES = (63, 64, 80)
Tensors = dict[str, torch.Tensor]


def found(given: Path | None, refuse: Callable[[str], object]) -> Path | None:
    """The folder of all fixtures: the one given, which must be one, or the one beside the repository if it is there."""
    folder = given or BESIDE
    if (folder / "v41-tiny").is_dir():
        return folder
    if given:
        refuse(f"argument --fixtures: {given} has no v41-tiny")
    return None


def compare(kernels: str, fixtures: Path | None, config: Path | None) -> list[Row]:
    """All rows for one choice of kernels."""
    label = f"v41 {kernels}"
    rows = [*storage_rows(label, kernels), *format_rows(), *engram_rows(), *published_rows(config)]
    rows += [*image_rows(), *vision_rows()]
    if fixtures is not None:
        rows += [*logit_rows(label, kernels, fixtures), *trace_rows(label, kernels, fixtures)]
        rows += [*replay_rows(label, kernels, fixtures), *prompt_rows(label, kernels, fixtures)]
    return rows


def storage_rows(label: str, kernels: str) -> Iterator[Row]:
    """The published storage: FP8 blocks of 32 x 32, packed FP4 experts, FP8 table rows; and what a prefix needs."""
    expected = load_file(SHIPPED / "tiny-q-logits.safetensors")
    family, _ = open_tiny(SHIPPED / "tiny-q", kernels)
    yield from length_rows(f"{label}, published storage", family, expected, "logits0", BAR)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(SHIPPED / "tiny-q", Path(name) / "model"))
        tokens = expected["ids_90"].tolist()
        yield from prefix_rows(label, folder, kernels, tokens, expected["logits0_90"], BOUNDARIES, {"open_2": 2})
        yield _other_scales_row(label, kernels, folder, expected)


def _other_scales_row(label: str, kernels: str, folder: Path, expected: Tensors) -> Row:
    """Negative control: the same bytes with the scales of one matrix twice as large. Spoils `folder`."""
    weights = load_file(folder / "model.safetensors")
    name = "layers.2.attn.wq_b.scale"
    weights[name] = (weights[name].view(torch.uint8) + 1).view(weights[name].dtype)  # E8M0: the next power of two
    save_file(weights, folder / "model.safetensors")
    family, _ = open_tiny(folder, kernels)
    tokens = expected["ids_33"].tolist()
    worst = difference(run(family, fresh(family), tokens, 33), expected["logits0_33"])
    return Row(f"{label}, scales of one matrix twice as large", worst, "", CONTROL_BAR, ">=")


def logit_rows(label: str, kernels: str, fixtures: Path) -> Iterator[Row]:
    """Cached records as computed, and as their 8 and 4 bit formats hold them; one must not pass for the other."""
    expected = load_file(fixtures / "v41-tiny-logits.safetensors")
    exact, rounded = (opened(fixtures / "v41-tiny", kernels, fake_quantize=on) for on in (False, True))
    yield from length_rows(f"{label}, bf16 storage", exact, expected, "logits0", BAR)
    yield from length_rows(f"{label}, rounded caches", rounded, expected, "logits1", QUANTIZED_BAR)
    tokens = expected["ids_33"].tolist()
    worst = difference(run(exact, fresh(exact), tokens, 33), expected["logits1_33"])
    yield Row(f"{label}, caches that should be rounded and are not", worst, "", CONTROL_BAR, ">=")


def length_rows(label: str, family: V41, expected: Tensors, kind: str, bar: float) -> Iterator[Row]:
    """One row per recorded length, the worst of all chunkings; of rounded caches only the rows recorded as stable."""
    lengths = sorted(int(name.rpartition("_")[2]) for name in expected if name.startswith(f"{kind}_"))
    for length in lengths:
        tokens, logits = expected[f"ids_{length}"].tolist(), expected[f"{kind}_{length}"]
        stable = expected[f"stable1_{length}"].bool() if kind == "logits1" else torch.ones(length, dtype=torch.bool)
        if not stable.any():
            continue
        worst = 0.0
        for chunk in sorted({length, 1, 3, 7, 16}):
            worst = max(worst, difference(run(family, fresh(family), tokens, chunk)[stable], logits[stable]))
        yield Row(f"{label}: {length} tokens, worst of all chunkings", worst, "", bar)


def opened(folder: Path, kernels: str, **serving: bool) -> V41:
    """The checkpoint in `folder` with these switches of its `serving` section."""
    source = Folder(folder)
    source.config = source.config | {"serving": serving}
    return load(source, torch.float32, False, choose(kernels), BLOCK_TOKENS, None)
