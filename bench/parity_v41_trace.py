"""V4.1's recorded trace: what every layer computed. Knows the trace's names; computes no reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.parity_prefix import BAR, CONTROL_BAR
from bench.parity_run import BLOCKS, difference, open_tiny, run
from bench.table import Row
from engine.cache.pool import CachePool
from engine.families.v41.model import V41
from kernels.operands import Selection

SOURCES, CHOOSERS, DRAFTED = (2, 4, 6), (2, 4, 6, 8, 10), (9, 10, 11)
Told = dict[tuple[str, int], Any]
Tensors = dict[str, torch.Tensor]


def trace_rows(label: str, kernels: str, fixtures: Path) -> Iterator[Row]:
    """Streams, mixing, selections, candidates, entries, index keys, Engram rows and draft features of 64 tokens."""
    expected, told = load_file(fixtures / "v41-tiny-trace.safetensors"), Told()
    family, pool = open_tiny(fixtures / "v41-tiny", kernels)
    if not isinstance(family, V41):
        raise ValueError(f"{fixtures / 'v41-tiny'} is no V4.1 checkpoint")
    family.probe = lambda what, layer, value: told.__setitem__((what, layer), value)
    logits = run(family, pool, expected["ids"].tolist(), len(expected["ids"]))
    layers = range(family.config.layers)
    worst = max(difference(told["streams", layer], expected[f"X_after_{layer}"]) for layer in layers)
    yield Row(f"{label} trace: streams after each of {len(layers)} layers", worst, "", BAR)
    worst = max(difference(told["pre", layer], expected[f"pre_after_{layer}"]) for layer in layers)
    yield Row(f"{label} trace: mixing after each of {len(layers)} layers", worst, "", BAR)
    worst = max(
        difference(told["entering", layer].mean(1), expected[f"stream_mean_entering_{layer}"]) for layer in DRAFTED
    )
    yield Row(f"{label} trace: stream means entering layers {DRAFTED}", worst, "", BAR)
    yield Row(f"{label} trace: logits", difference(logits, expected["logits"]), "", BAR)
    yield from _choice_rows(label, family, told, expected)
    yield from _entry_rows(label, family, pool, expected)
    wrong = int((told["engram rows", -1] != expected["engram_rows"]).sum())
    yield Row(f"{label} trace: differing Engram rows", wrong, "", 0)


def _choice_rows(label: str, family: V41, told: Told, expected: Tensors) -> Iterator[Row]:
    """Selections exactly; the control compares each with another layer's."""
    wrong, crossed = 0, 0
    for layer in CHOOSERS:
        wanted = expected[f"selected_{layer}"].bool()
        chosen = marked(told["shared", layer].selection, wanted.shape[1])
        wrong += int((chosen != wanted).sum())
        other = expected["selected_6" if layer > 6 else "selected_4" if layer == 2 else "selected_2"].bool()
        crossed += int((chosen != other).sum()) if chosen.shape == other.shape else 0
    yield Row(f"{label} trace: differing choices of layers {CHOOSERS}", wrong, "", 0)
    yield Row(f"{label} trace: choices held against another layer's, differing", crossed, "", 1, ">=")
    wanted, size = expected["candidates"].bool(), family.config.candidate_block_entries
    found = marked(told["shared", family.config.layers - 1].candidates, wanted.shape[1], size)
    yield Row(f"{label} trace: differing candidates", int((found != wanted).sum()), "", 0)


def _entry_rows(label: str, family: V41, pool: CachePool, expected: Tensors) -> Iterator[Row]:
    tokens = len(expected["ids"])
    for name, group in (("entries", "entries"), ("index_keys", "index")):
        worst, shifted = 0.0, float("inf")
        for layer in SOURCES:
            role = family.config.schedule.roles[layer]
            found = records(pool, f"{group}_{role.ratio}", role.place, tokens)
            worst = max(worst, difference(found, expected[f"{name}_{layer}"]))
            shifted = min(shifted, difference(found[1:], expected[f"{name}_{layer}"][:-1]))
        yield Row(f"{label} trace: {name} of layers {SOURCES}", worst, "", BAR)
        yield Row(f"{label} trace: {name}, one place off", shifted, "", CONTROL_BAR, ">=")


def marked(selection: Selection, width: int, entries: int = 1) -> torch.Tensor:
    """A selection as bool [rows, width]; each number stands for `entries` of them."""
    chosen = torch.zeros(len(selection.counts), -(-width // entries), dtype=torch.bool)
    for row, count in enumerate(selection.counts.tolist()):
        chosen[row, selection.entries[row, :count].long()] = True
    return chosen.repeat_interleave(entries, 1)[:, :width]


def records(pool: CachePool, name: str, layer: int, tokens: int) -> torch.Tensor:
    """Records fp32 of one layer of a global group, for a sequence whose blocks are in falling order."""
    group = pool.layout.group(name)
    blocks = range(BLOCKS - 1, BLOCKS - 1 - pool.layout.blocks_for(tokens), -1)
    extents = [pool.block_extent(name, b).view("float32").reshape(group.layers, group.entries, -1) for b in blocks]
    return torch.cat([torch.from_numpy(extent[layer].copy()) for extent in extents])[: tokens // group.tokens_per_entry]
