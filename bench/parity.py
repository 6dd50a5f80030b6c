"""Parity of each family with its reference: logits on tiny random checkpoints, in pieces, batches and after a hit.

The reference is transformers; for V4.1 it is recorded outputs. A figure is the largest absolute difference of any logit
(their spread is about 2.3) unless it says otherwise. Negative controls drop or change one piece: they must fail, or the
check would not see that piece missing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from bench import parity_v41
from bench.arguments import Parser, existing_file, existing_folder, new_file, positive
from bench.parity_cases import FAMILIES, write
from bench.parity_prefix import BAR, prefix_rows, resume
from bench.parity_run import difference, open_tiny, run, tokens_of
from bench.table import Row, report
from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from kernels import choose

LENGTHS = (1, 5, 15, 16, 17, 33, 70, 90)
CHUNKS = (3, 7, 16)
BOUNDARIES = (64, 66, 80, 81)
TOKENS = 112  # of the prefix runs
GENERATED = 32
OPEN_AT = {"hca_state": 16}  # the tiny models' rate
V41 = "v41"


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


def forward(reference: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """transformers' logits, without its cache."""
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def compare(family: str, kernels: str, seeds: int) -> list[Row]:
    """All rows for one family of transformers and choice of kernels."""
    rows: list[Row] = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = write(family, Path(name), seed)
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            label, tokens = f"{family} {kernels}", tokens_of(TOKENS, seed)
            subject, expected = (label, reference, folder, kernels, seed), forward(reference, tokens)
            rows += [*length_rows(*subject), mixed_row(*subject), generation_row(*subject)]
            rows += prefix_rows(label, folder, kernels, tokens, expected, BOUNDARIES, OPEN_AT)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and compare."""
    parser = Parser(description=__doc__)
    known = sorted([*FAMILIES, V41])
    parser.add_argument("--family", action="append", choices=known, help="repeatable; default v4")
    parser.add_argument("--all", action="store_true", help="every family")
    parser.add_argument("--json", type=new_file, help="also write the table here")
    parser.add_argument("--kernels", action="append", help="cpu, reference, ... (repeatable; default: what auto takes)")
    parser.add_argument("--seeds", type=positive, default=1, help="random checkpoints to compare (default 1)")
    parser.add_argument(
        "--fixtures", type=existing_folder, help="folder of all recorded outputs of V4.1 (default: the shipped ones)"
    )
    parser.add_argument(
        "--v41-config", type=existing_file, help="V4.1's published config.json (default: the copy shipped)"
    )
    parser.add_argument("--resume", nargs=2, type=Path, metavar=("STATE", "RESULT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    kernels = options.kernels or [choose().name]
    if options.resume:
        resume(*options.resume, kernels[0])
        return 0
    fixtures = parity_v41.found(options.fixtures, parser.error)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    families = known if options.all else options.family or ["v4"]
    rows = [row for one in families if one != V41 for choice in kernels for row in compare(one, choice, options.seeds)]
    if V41 in families:
        rows += [row for choice in kernels for row in parity_v41.compare(choice, fixtures, options.v41_config)]
        if fixtures is None:
            print("V4.1: only the recorded outputs that ship; --fixtures names the folder with all of them")
    return report(f"{', '.join(families)} against their references: largest logit difference", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
