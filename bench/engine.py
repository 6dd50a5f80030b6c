"""The engine against other engines on the same weights, batch 1 and 8; all choose greedily and ignore end tokens.

`python -m bench.engine [--json PATH] [--model DIR]`: against transformers' `generate`, interleaved in one process.
Times are whole generations, prompt included; both sides must agree on the prompt's logits before that.
`python -m bench.engine --family v3 --peer vllm --peer transformers`: on a random checkpoint, bf16, every engine in a
process and an environment of its own (`make peers` builds vLLM's). Exit code 1 for a missed bar, 2 for a missing peer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from bench.arguments import Parser, model_folder, new_file, positive
from bench.beside import FAMILIES, beside
from bench.contest import PEERS, MissingPeer
from bench.generation import finish, generate
from bench.reference import open_reference
from bench.table import Row, report
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import FirstToken
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams

BARS = {1: 2.0, 8: 5.0}  # batch -> how many times faster
LOGPROB_BAR = 1e-3
THREADS = 2
_FIRST_ORDINARY_TOKEN = 64  # below are special tokens
Prompts = list[tuple[int, ...]]


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, report; exit code 0 if every bar is reached, 2 if a peer is not there."""
    options = _options(argv)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return _against_transformers(options) if options.family is None else _beside_peers(options)


def _beside_peers(options: argparse.Namespace) -> int:
    try:
        rows = beside(options, THREADS)
    except MissingPeer as missing:
        print(f"bench.engine: {missing}", file=sys.stderr)
        return 2
    return report(f"engine ({options.family}, random, bf16) beside its peers, {THREADS} threads", rows, options.json)


def _against_transformers(options: argparse.Namespace) -> int:
    options.prompt, options.new = options.prompt or 512, options.new or 128
    torch.set_num_threads(THREADS)
    engine = Engine.open(
        EngineConfig(options.model, num_blocks=16 * (-(-(options.prompt + options.new) // 128)), threads=THREADS)
    )
    with tempfile.TemporaryDirectory() as folder:
        reference = open_reference(options.model, Path(folder))
        rows = [*agreement(engine, reference, options), *speed(engine, reference, options)]
    title = (
        f"engine ({options.model.name}) against transformers, {THREADS} threads, {options.prompt}+{options.new} tokens"
    )
    return report(title, rows, options.json)


def agreement(engine: Engine, reference: PreTrainedModel, options: argparse.Namespace) -> list[Row]:
    """Largest difference of any next-token log probability of one prompt, and how long greedy outputs stay equal."""
    (prompt,) = prompts(engine, 1, options.prompt, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    engine.submit(GenerateRequest("agreement", prompt, params, cache=False))
    (first,) = (event for event in finish(engine) if isinstance(event, FirstToken))
    ours = [entry.logprob for entry in first.prompt_logprobs or () if entry is not None]
    with torch.inference_mode():
        scores = reference(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    theirs = scores[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    pair = generate(engine, [prompt], options.new)[0], generate_reference(reference, [prompt], options.new)[0]
    differing = [place for place, (mine, other) in enumerate(zip(*pair, strict=True)) if mine != other]
    return [
        Row("largest difference of a log probability", float(np.abs(theirs.numpy() - ours).max()), "", LOGPROB_BAR),
        Row("greedy tokens before the first difference", (differing or [options.new])[0], f"of {options.new}", 1, ">="),
    ]


def speed(engine: Engine, reference: PreTrainedModel, options: argparse.Namespace) -> list[Row]:
    """Median tokens per second of both sides at every batch size, and their ratio from the same interleaved repeats."""
    rows = []
    for batch, bar in BARS.items():
        ours, theirs = [], []
        for repeat in range(options.repeats + 1):
            batch_prompts = prompts(engine, batch, options.prompt, seed=repeat + 1)
            ours.append(_timed(partial(generate, engine, batch_prompts, options.new)))
            theirs.append(_timed(partial(generate_reference, reference, batch_prompts, options.new)))
        mine, other = (batch * options.new / statistics.median(times[1:]) for times in (ours, theirs))  # first: warm-up
        rows += [
            Row(f"batch {batch}: transformers", other, "tokens/s"),
            Row(f"batch {batch}: engine", mine, "tokens/s"),
            Row(f"batch {batch}: ratio", mine / other, "x", bar, ">="),
        ]
    return rows


def prompts(engine: Engine, count: int, length: int, seed: int) -> Prompts:
    """Seeded prompts of ordinary tokens."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(_FIRST_ORDINARY_TOKEN, engine.model.vocab_size, (count, length))
    return [tuple(row) for row in drawn.tolist()]


def generate_reference(reference: PreTrainedModel, given: Prompts, new_tokens: int) -> list[list[int]]:
    """Greedy continuations by transformers, with its cache."""
    length = len(given[0])
    with torch.inference_mode():
        output = reference.generate(
            torch.tensor(given), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return [row[length:].tolist() for row in output]


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="also write the table here")
    parser.add_argument("--model", type=model_folder, default=Path(__file__).parent.parent / "models" / "nano")
    parser.add_argument("--family", choices=sorted(FAMILIES), help="a random checkpoint of it instead of --model")
    parser.add_argument("--peer", action="append", choices=sorted(PEERS), help="with --family; repeatable")
    parser.add_argument("--prompt", type=positive, help="prompt tokens (512; with --family 256)")
    parser.add_argument("--new", type=positive, help="new tokens (128; with --family 64)")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="with --family: begin no repeat after them")
    options = parser.parse_args(argv)
    if options.peer and not options.family:
        parser.error("--peer needs --family; without it the engine runs against transformers")
    return options


if __name__ == "__main__":
    sys.exit(main())
