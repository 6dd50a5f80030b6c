"""Window state at a prefix hit: the three policies on nano through real workers, and bounded replay of V4.1.

`python -m bench.replay [--json PATH] [--part window|v41]`. nano's rows are described in `bench.window_state`. V4.1 is a
seeded random model of its shape, made on the fly and wide enough to time; both sides run the same weights, in turn, in
one process. Deviations there are those of random weights: they show that replay is approximate, not how good its
answers are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.arguments import Parser, new_file, positive
from bench.table import Row, report
from bench.window_state import LONGEST, SHORTEST, window_rows
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Failed, FirstToken
from engine.families.v41.tiny import TinySpec, write_tiny
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams
from fabric.kvlink import ucx_lanes

PARTS = ("window", "v41")
BAR = 0.65
BUDGETS = (512, 2048)  # tokens of one step: the engine's default, and the whole prompt at once
BLOCK = 128
WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "index_head_dim": 64,
    "index_topk": 128,
    "candidate_topk_blocks": 64,
    "candidate_block_size": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "swiglu_limit": 10.0,
}
MODES = {
    "exact": {"encoder_replay": False},
    "decoder-side": {"decoder_replay": True},
    "encoder-side": {"encoder_replay": True},
    "both": {"encoder_replay": True, "decoder_replay": True},
}


@dataclass(frozen=True, slots=True)
class Setting:
    """How everything is measured: runs of each side, threads, and a clock in seconds."""

    repeat: int
    threads: int
    clock: Callable[[], float]


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, report; exit code 0 if every bar is reached."""
    parser = Parser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="one part alone; all without")
    parser.add_argument("--tokens", type=positive, default=2048, help="of V4.1's prompt (default 2048)")
    parser.add_argument("--nano-tokens", type=positive, default=4000, help="of nano's prompt (default 4000)")
    parser.add_argument("--repeat", type=positive, default=3, help="runs of each side (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="V4.1 in CPU seconds: for a busy machine")
    parser.add_argument("--json", type=new_file, help="also write the table here")
    options = parser.parse_args(argv)
    if options.tokens <= 4 * BLOCK or min(options.repeat, options.threads) < 1:
        parser.error(f"argument --tokens: use more than {4 * BLOCK}; --repeat and --threads: at least 1")
    if not SHORTEST < options.nano_tokens <= LONGEST:
        parser.error(f"argument --nano-tokens: use {SHORTEST + 1} to {LONGEST}: recompute alone takes {SHORTEST}")
    rows: list[Row] = []
    for part in options.part or PARTS:
        rows += window_part(options) if part == "window" else v41_part(options)
    what = f"{options.threads} threads, V4.1 in {'CPU' if options.cpu_time else 'wall'} time"
    prompts = f"nano {options.nano_tokens} tokens, V4.1 {options.tokens} tokens"
    return report(f"Window state at a prefix hit: {prompts}, {what}", rows, options.json)


def window_part(options: argparse.Namespace) -> Iterator[Row]:
    """The three policies on nano."""
    ucx_lanes.prepare()
    return window_rows(options.nano_tokens, options.repeat, options.threads, options.seed)


def v41_part(options: argparse.Namespace) -> list[Row]:
    """Both sides of bounded replay on a model of V4.1's shape."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    setting = Setting(options.repeat, options.threads, clock)
    prompt = tuple(np.random.default_rng(options.seed).integers(3, 511, options.tokens).tolist())
    with tempfile.TemporaryDirectory() as name:
        folders = write_models(Path(name), options.seed)
        rows = [row for budget in BUDGETS for row in prefill_rows(folders, prompt, budget, setting)]
        rows += hit_rows(folders, prompt, setting)
    return [replace(row, name=f"V4.1 {row.name}") for row in rows]


def write_models(folder: Path, seed: int) -> dict[str, Path]:
    """One folder per mode: the same weights, served differently."""
    first = write_tiny(folder / "weights", TinySpec(seed, overrides=tuple(WIDE.items())))
    folders = {}
    for mode, switches in MODES.items():
        folders[mode] = folder / mode
        folders[mode].mkdir()
        for file in first.iterdir():
            (folders[mode] / file.name).symlink_to(file)
        config = json.loads((first / "config.json").read_text(encoding="utf-8"))
        (folders[mode] / "config.json").unlink()
        served = json.dumps(config | {"serving": switches})
        (folders[mode] / "config.json").write_text(served, encoding="utf-8")
    return folders


def opened(folder: Path, budget: int, tokens: int, threads: int) -> Engine:
    """The model of one folder, with room for one prompt and its cached prefix."""
    blocks = 2 * (-(-tokens // BLOCK) + 1)
    return Engine.open(EngineConfig(folder, num_blocks=blocks, threads=threads, max_batch_tokens=budget))


def first_token(
    engine: Engine, prompt: tuple[int, ...], cache: bool, clock: Callable[[], float]
) -> tuple[float, FirstToken]:
    """Seconds until a prompt's first token, and that token with its alternatives' log probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
    started = clock()
    engine.submit(GenerateRequest("r", prompt, params, cache=cache))
    found: FirstToken | None = None
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            found = event if isinstance(event, FirstToken) else found
    if found is None:
        raise RuntimeError("the engine drew no token")
    return clock() - started, found


def prefill_rows(folders: dict[str, Path], prompt: tuple[int, ...], budget: int, setting: Setting) -> Iterator[Row]:
    """A cold prefill with every row in every layer, and with the last window alone in the upper half, in turn."""
    exact, replaying = (
        opened(folders[mode], budget, len(prompt), setting.threads) for mode in ("exact", "decoder-side")
    )
    engines = (exact, replaying)
    pairs = [[first_token(engine, prompt, False, setting.clock) for engine in engines] for _ in range(setting.repeat)]
    whole, trimmed = (statistics.median(seconds for seconds, _ in runs) for runs in zip(*pairs, strict=True))
    yield Row(f"prefill, steps of {budget}: exact", whole, "s")
    yield Row(f"prefill, steps of {budget}: decoder-side replay", trimmed, "s")
    yield Row(f"prefill, steps of {budget}: decoder-side replay / exact", trimmed / whole, "x", BAR)
    shift = moved(pairs[0][0][1], pairs[0][1][1])
    yield Row(f"prefill, steps of {budget}: log probabilities moved by decoder-side replay", shift)


def hit_rows(folders: dict[str, Path], prompt: tuple[int, ...], setting: Setting) -> Iterator[Row]:
    """A prompt of which the last block alone is new: window restored from an anchor, or replayed.

    Log probabilities are held against a cold and exact run; an exact hit moves none.
    """
    budget, clock = BUDGETS[0], setting.clock
    modes = ("exact", "encoder-side", "both")
    engines = {mode: opened(folders[mode], budget, len(prompt), setting.threads) for mode in modes}
    _, cold = first_token(engines["exact"], prompt, False, clock)
    for engine in engines.values():
        first_token(engine, prompt[: len(prompt) - BLOCK + 1], True, clock)
    turns = [{mode: first_token(engines[mode], prompt, True, clock) for mode in modes} for _ in range(setting.repeat)]
    for mode, engine in engines.items():
        found = turns[0][mode][1]
        hit_tokens = found.cached_tokens + engine.model.layout.replay.tokens
        if hit_tokens < len(prompt) - 2 * BLOCK:
            raise RuntimeError(f"{mode}: only {hit_tokens} tokens were hit")
        name = f"hit of {hit_tokens} tokens, {mode}"
        kept = engine.memory.index.anchors * engine.model.layout.window_bytes / 2**20
        yield Row(f"{name}: first token", statistics.median(turn[mode][0] for turn in turns), "s")
        yield Row(f"{name}: window state kept", kept, "MiB")
        yield Row(f"{name}: log probabilities moved", moved(cold, found), "", 0 if mode == "exact" else None)


def moved(exact: FirstToken, found: FirstToken) -> float:
    """Largest difference over the tokens that both list; NaN if they share none."""
    if exact.logprob is None or found.logprob is None:
        raise RuntimeError("no log probabilities came back")
    wanted, other = (dict(first.logprob.top) for first in (exact, found))
    return max((abs(wanted[token] - other[token]) for token in wanted.keys() & other.keys()), default=float("nan"))


if __name__ == "__main__":
    sys.exit(main())
