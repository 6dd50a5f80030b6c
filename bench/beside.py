"""A family's engine beside other engines, on one random checkpoint: tokens per second, their ratios and the bars."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.contest import ENGINE, PEERS, compete
from bench.job import Job, Timing
from bench.random_v3 import VOCABULARY, write_random_v3
from bench.table import Row

FAMILIES = {"v3": (write_random_v3, VOCABULARY)}
BATCHES = (1, 8)
BARS = {("vllm", 1): 2.0, ("vllm", 8): 2.0, ("transformers", 8): 8.0}  # (peer, batch) -> how many times faster
SAME_BAR = 0.75  # of the first tokens: in bf16 two right engines may differ where two tokens are close
PROMPT, NEW = 256, 64


def beside(options: argparse.Namespace, threads: int) -> list[Row]:
    """Every contender on the same job. Raises MissingPeer before any work if an environment does not stand."""
    peers = [PEERS[name] for name in dict.fromkeys(options.peer or ())]
    for peer in peers:
        peer.require()
    write, vocabulary = FAMILIES[options.family]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write(Path(folder))
        job = Job(
            str(checkpoint), vocabulary, BATCHES, options.prompt or PROMPT, options.new or NEW, threads,
            options.repeats, options.seconds,
        )  # fmt: skip
        mine = compete(ENGINE, job)
        theirs = {peer.name: compete(peer, job) for peer in peers}
    return rows_of(mine, theirs, job.new)


def rows_of(mine: Sequence[Timing], theirs: dict[str, Sequence[Timing]], new: int) -> list[Row]:
    """Two figures a batch: whole generations, prompt included, and decoding alone; a bar holds for both."""
    rows = [row for timing in mine for row in _figures("engine", timing, new)]
    for name, timings in theirs.items():
        for ours, other in zip(mine, timings, strict=True):
            rows += _figures(name, other, new)
            bar = BARS.get((name, ours.batch))
            for what, one, two in zip(("whole", "decode"), _speeds(ours, new), _speeds(other, new), strict=True):
                rows.append(Row(f"batch {ours.batch}, {what}: engine / {name}", one / two, "x", bar, ">="))
            same = statistics.mean(a[0] == b[0] for a, b in zip(ours.tokens, other.tokens, strict=True))
            if ours.batch > 1:
                rows.append(Row(f"batch {ours.batch}: first tokens like {name}'s", same, "", SAME_BAR, ">="))
    return rows


def _speeds(timing: Timing, new: int) -> tuple[float, float]:
    """Tokens per second of whole generations, and of the tokens after the first."""
    whole = statistics.median(timing.whole_s)
    decoding = statistics.median(long - short for long, short in zip(timing.whole_s, timing.first_s, strict=True))
    return timing.batch * new / whole, timing.batch * (new - 1) / decoding


def _figures(name: str, timing: Timing, new: int) -> list[Row]:
    whole, decode = _speeds(timing, new)
    return [
        Row(f"batch {timing.batch}, whole: {name}", whole, "tokens/s"),
        Row(f"batch {timing.batch}, decode: {name}", decode, "tokens/s"),
    ]
