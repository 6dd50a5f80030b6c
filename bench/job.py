"""What every contender does: the same seeded prompts, warmed up, whole generations and first tokens timed apart.

Imports the standard library and numpy alone, because it also runs inside the peers' environments.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]  # prompts, new tokens -> greedy continuations of exactly that length
_FIRST_ORDINARY_TOKEN = 64  # below are special tokens


@dataclass(frozen=True, slots=True)
class Job:
    """One contest. `seconds`: no further repeat of a batch begins after them; the first always runs."""

    model: str
    vocabulary: int
    batches: tuple[int, ...]
    prompt: int
    new: int
    threads: int
    repeats: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One batch size: seconds per repeat of whole generations and of the first token alone, and what came out."""

    batch: int
    whole_s: tuple[float, ...]
    first_s: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]  # of the first repeat


def prompts(job: Job, batch: int, seed: int) -> Prompts:
    """Seeded prompts of ordinary tokens."""
    drawn = np.random.default_rng(seed).integers(_FIRST_ORDINARY_TOKEN, job.vocabulary, (batch, job.prompt))
    return [[int(token) for token in row] for row in drawn]


def measure(job: Job, generate: Generate, clock: Callable[[], float] = time.perf_counter) -> list[Timing]:
    """Time every batch size. Raises RuntimeError if a continuation has not the length that was asked for."""
    return [_measure(job, batch, generate, clock) for batch in job.batches]


def _measure(job: Job, batch: int, generate: Generate, clock: Callable[[], float]) -> Timing:
    _checked(generate, prompts(job, batch, 0), 4)
    whole, first, tokens = [], [], []
    begun = clock()
    for repeat in range(job.repeats):
        if repeat and clock() - begun > job.seconds:
            break
        given = prompts(job, batch, repeat + 1)
        start = clock()
        tokens.append(_checked(generate, given, job.new))
        middle = clock()
        _checked(generate, given, 1)
        whole.append(middle - start)
        first.append(clock() - middle)
    return Timing(batch, tuple(whole), tuple(first), tuple(map(tuple, tokens[0])))


def _checked(generate: Generate, given: Prompts, new: int) -> Prompts:
    made = generate(given, new)
    if [len(tokens) for tokens in made] != [new] * len(given):
        raise RuntimeError(f"{[len(tokens) for tokens in made]} tokens came, {new} of each were asked for")
    return made


def write_job(job: Job, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_timings(path: Path) -> list[Timing]:
    """What `run` wrote."""
    listed = json.loads(path.read_text(encoding="utf-8"))
    return [
        Timing(one["batch"], tuple(one["whole_s"]), tuple(one["first_s"]), tuple(map(tuple, one["tokens"])))
        for one in listed
    ]


def run(open_generate: Callable[[Job], Generate], argv: Sequence[str] | None = None) -> int:
    """The main function of a contender: `python -m MODULE JOB RESULTS`."""
    parser = argparse.ArgumentParser(description="One contender of bench.engine --peer, which runs it.")
    parser.add_argument("job", type=Path, help="JSON file that says what to measure")
    parser.add_argument("results", type=Path, help="JSON file to write")
    asked = parser.parse_args(argv)
    given, results = asked.job, asked.results
    if not given.is_file():
        parser.error(f"argument job: {given} is not a file")
    fields = json.loads(given.read_text(encoding="utf-8"))
    job = Job(**{**fields, "batches": tuple(fields["batches"])})
    timings = measure(job, open_generate(job))
    results.write_text(json.dumps([asdict(timing) for timing in timings]), encoding="utf-8")
    return 0
