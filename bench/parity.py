"""Parity of each family with transformers: logits on tiny random checkpoints, in pieces, batches and after a hit.

Every figure is the largest absolute difference of any logit (their spread is about 2.3). Negative controls drop one
piece of the cached state at a boundary: they must fail, or the check would not see that piece missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from bench.parity_cases import FAMILIES, write
from bench.table import Row, report
from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.families import Family, open_family
from engine.layout import GroupKind
from kernels import choose

BAR, CONTROL_BAR = 1e-3, 5e-2
LENGTHS = (1, 5, 15, 16, 17, 33, 70, 90)
CHUNKS = (3, 7, 16)
BOUNDARIES = (64, 66, 80, 81)
TOKENS = 112  # of the prefix runs
GENERATED = 32
BLOCK_TOKENS, BLOCKS = 16, 16
HCA_RATE = 16


def tokens_of(count: int, seed: int) -> list[int]:
    """Seeded tokens without the special ones."""
    return np.random.default_rng(seed).integers(3, 512, count).tolist()


def open_tiny(folder: Path, kernels: str) -> tuple[Family, CachePool]:
    """The engine's model and an empty pool."""
    family = open_family(folder, torch.float32, False, choose(kernels), block_tokens=BLOCK_TOKENS)
    return family, CachePool(family.layout, BLOCKS, 4, torch.float32)


def run(family: Family, pool: CachePool, tokens: list[int], chunk: int, start: int = 0) -> torch.Tensor:
    """Logits of tokens[start:], computed `chunk` at a time over what the pool holds."""
    logits = []
    for at in range(start, len(tokens), chunk):
        piece = tokens[at : at + chunk]
        batch = RaggedBatch(
            tokens=np.array(piece, np.int64),
            positions=np.arange(at, at + len(piece), dtype=np.int64),
            starts=np.array([0, len(piece)], np.int32),
            context=np.array([at], np.int32),
            block_tables=(tuple(range(BLOCKS - 1, -1, -1)),),  # any order must do
            slots=np.array([1], np.int64),
            logit_rows=np.arange(len(piece), dtype=np.int64),
        )
        logits.append(family.forward(batch, pool))
    return torch.cat(logits)


def length_rows(label: str, reference: torch.nn.Module, folder: Path, kernels: str, seed: int) -> Iterator[Row]:
    """One row per length: the worst over all chunkings."""
    family, pool = open_tiny(folder, kernels)
    for length in LENGTHS:
        tokens = tokens_of(length, seed + length)
        expected = forward(reference, tokens)
        for how, chunk in [("one piece", length), ("decode only", 1), *((f"chunks of {c}", c) for c in CHUNKS)]:
            worst = difference(run(family, pool, tokens, chunk), expected)
            yield Row(f"{label}: {length} tokens, {how}", worst, "", BAR)


def mixed_row(label: str, reference: torch.nn.Module, folder: Path, kernels: str, seed: int) -> Row:
    """All lengths in one batch, each by chunks of its own, so that prefill pieces and decode steps mix."""
    family, _ = open_tiny(folder, kernels)
    per = family.layout.blocks_for(max(LENGTHS))
    pool = CachePool(family.layout, per * len(LENGTHS), len(LENGTHS), torch.float32)
    prompts = [tokens_of(length, seed + length) for length in LENGTHS]
    expected = [forward(reference, tokens) for tokens in prompts]
    done, worst = [0] * len(LENGTHS), 0.0
    while live := [i for i, length in enumerate(LENGTHS) if done[i] < length]:
        ends = {i: min(LENGTHS[i], done[i] + (1, 16, 5)[i % 3]) for i in live}
        counts = [ends[i] - done[i] for i in live]
        batch = RaggedBatch(
            tokens=np.concatenate([np.array(prompts[i][done[i] : ends[i]], np.int64) for i in live]),
            positions=np.concatenate([np.arange(done[i], ends[i], dtype=np.int64) for i in live]),
            starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            context=np.array([done[i] for i in live], np.int32),
            block_tables=tuple(tuple(range(i * per, (i + 1) * per)) for i in live),
            slots=np.array(live, np.int64),
            logit_rows=np.arange(sum(counts), dtype=np.int64),
        )
        for i, part in zip(live, family.forward(batch, pool).split(counts), strict=True):
            worst = max(worst, difference(part, expected[i][done[i] : ends[i]]))
            done[i] = ends[i]
    return Row(f"{label}: all lengths in mixed batches", worst, "", BAR)


def generation_row(label: str, reference: torch.nn.Module, folder: Path, kernels: str, seed: int) -> Row:
    """Greedy tokens that differ from transformers' own generation."""
    family, pool = open_tiny(folder, kernels)
    tokens = tokens_of(70, seed)
    settings = {"max_new_tokens": GENERATED, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    expected = reference.generate(torch.tensor([tokens]), **settings)[0].tolist()
    logits = run(family, pool, tokens, len(tokens))
    for _ in range(GENERATED):
        tokens.append(int(logits[-1].argmax()))
        logits = run(family, pool, tokens, 1, len(tokens) - 1)
    differing = sum(a != b for a, b in zip(tokens, expected, strict=True))
    return Row(f"{label}: differing tokens of {GENERATED} generated greedily", differing, "", 0)


def prefix_rows(label: str, reference: torch.nn.Module, folder: Path, kernels: str, seed: int) -> Iterator[Row]:
    """Resume at each boundary in a second process from the bytes of the pool's extents; then without each group."""
    tokens = tokens_of(TOKENS, seed)
    expected = forward(reference, tokens)
    for boundary in BOUNDARIES:
        family, pool = open_tiny(folder, kernels)
        run(family, pool, tokens[:boundary], boundary)
        state, result = folder / f"state-{boundary}.npz", folder / f"result-{boundary}.npz"
        np.savez(state, tokens=np.array(tokens), boundary=boundary, **extents(pool))
        command = [sys.executable, "-m", "bench.parity", "--resume", str(state), str(result), "--kernels", kernels]
        subprocess.run(command, check=True, timeout=300)
        for dropped, logits in np.load(result).items():
            worst = difference(torch.from_numpy(logits), expected[boundary:])
            yield prefix_row(f"{label}: resume at {boundary}", boundary, dropped, worst)


def prefix_row(name: str, boundary: int, dropped: str, worst: float) -> Row:
    """The bar of one resume: exact when whole, and when only the open HCA rows lack at a boundary that has none."""
    if dropped == "nothing":
        return Row(f"{name}, second process", worst, "", BAR)
    if dropped == "hca_state" and boundary % HCA_RATE == 0:
        return Row(f"{name} without {dropped} (none is open)", worst, "", BAR)
    return Row(f"{name} without {dropped}", worst, "", CONTROL_BAR, ">=")


def extents(pool: CachePool) -> dict[str, np.ndarray]:
    """Every extent of every group: what a transfer would move."""
    return {
        group.name: np.stack(
            [pool.block_extent(group.name, block) for block in range(BLOCKS)]
            if group.kind is GroupKind.GLOBAL
            else [pool.slot_extent(group.name, 1)]
        )
        for group in pool.layout.groups
    }


def resume(state: Path, result: Path, kernels: str) -> None:
    """The second process: restore, continue, and again with each group's bytes left zero."""
    family, _ = open_tiny(state.parent, kernels)
    saved = np.load(state)
    tokens, boundary = saved["tokens"].tolist(), int(saved["boundary"])
    names = [group.name for group in family.layout.groups]
    results = {}
    for dropped in ["nothing", *names]:
        pool = CachePool(family.layout, BLOCKS, 4, torch.float32)
        for group in family.layout.groups:
            if group.name != dropped:
                restore(pool, group.name, group.kind, saved[group.name])
        results[dropped] = run(family, pool, tokens, TOKENS, boundary).numpy()
    np.savez(result, **results)


def restore(pool: CachePool, group: str, kind: GroupKind, data: np.ndarray) -> None:
    """Write one group's extents."""
    for at, record in enumerate(data):
        (pool.block_extent(group, at) if kind is GroupKind.GLOBAL else pool.slot_extent(group, 1))[:] = record


def forward(reference: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """transformers' logits, without its cache."""
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference; NaN if any value is."""
    return float((found - expected).abs().max())


def compare(family: str, kernels: str, seeds: int) -> list[Row]:
    """All rows for one family and choice of kernels."""
    rows: list[Row] = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = write(family, Path(name), seed)
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            subject = (f"{family} {kernels}", reference, folder, kernels, seed)
            rows += [*length_rows(*subject), mixed_row(*subject), generation_row(*subject), *prefix_rows(*subject)]
    return rows


def main() -> int:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(prog="python -m bench.parity", description=__doc__)
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="repeatable; default v4")
    parser.add_argument("--all", action="store_true", help="every family")
    parser.add_argument("--json", type=Path, help="also write the table here")
    parser.add_argument("--kernels", action="append", help="cpu, reference, ... (repeatable; default: what auto takes)")
    parser.add_argument("--seeds", type=int, default=1, help="random checkpoints to compare (default 1)")
    parser.add_argument("--resume", nargs=2, type=Path, metavar=("STATE", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    kernels = options.kernels or [choose().name]
    if options.resume:
        resume(*options.resume, kernels[0])
        return 0
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    families = sorted(FAMILIES) if options.all else options.family or ["v4"]
    rows = [row for family in families for choice in kernels for row in compare(family, choice, options.seeds)]
    return report(f"{', '.join(families)} against transformers: largest logit difference", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
