"""Bounded replay of V4.1 against exact window state: time to prefill, time after a prefix hit, and what it changes.

`python -m bench.replay [--json PATH]`. The model is a seeded random one with V4.1's shape, made on the fly and wide
enough to time; both sides run the same weights, in turn, in one process. Deviations are those of random weights: they
show that replay is approximate, not how good its answers are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bench.table import Row, report
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Failed, FirstToken
from engine.families.v41.tiny import TinySpec, write_tiny
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams

BAR = 0.65
THREADS = 2
BUDGETS = (512, 2048)  # tokens of one step: the engine's default, and the whole prompt at once
BLOCK = 128
WIDE = {
    "hidden_size": 384,
    "num_attention_heads": 8,
    "head_dim": 96,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 192,
    "o_lora_rank": 96,
    "sliding_window": 128,
    "index_head_dim": 64,
    "index_topk": 256,
    "candidate_topk_blocks": 96,
    "candidate_block_size": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "swiglu_limit": 10.0,
}
MODES = {
    "exact": (),
    "decoder-side": ("decoder_replay",),
    "encoder-side": ("encoder_replay",),
    "both": ("encoder_replay", "decoder_replay"),
}


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, report; exit code 0 if the bar is reached."""
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt (default 2048)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args(argv)
    if options.tokens <= 4 * BLOCK or options.repeat < 1:
        parser.error(f"argument --tokens: use more than {4 * BLOCK}; argument --repeat: at least 1")
    torch.set_num_threads(THREADS)
    prompt = tuple(np.random.default_rng(options.seed).integers(3, 511, options.tokens).tolist())
    with tempfile.TemporaryDirectory() as name:
        folders = write_models(Path(name), options.seed)
        rows = [*prefill_rows(folders, prompt, options.repeat), *hit_rows(folders, prompt, options.repeat)]
        rows += deviation_rows(folders, prompt)
    return report(f"V4.1 bounded replay, prompt of {options.tokens} tokens, {THREADS} threads", rows, options.json)


def write_models(folder: Path, seed: int) -> dict[str, Path]:
    """One folder per mode: the same weights, served differently."""
    first = write_tiny(folder / "exact", TinySpec(seed, overrides=tuple(WIDE.items())))
    folders = {"exact": first}
    for mode, switches in MODES.items():
        if mode == "exact":
            continue
        folders[mode] = folder / mode
        folders[mode].mkdir()
        for file in first.iterdir():
            (folders[mode] / file.name).symlink_to(file)
        config = json.loads((first / "config.json").read_text(encoding="utf-8"))
        (folders[mode] / "config.json").unlink()
        served = json.dumps(config | {"serving": dict.fromkeys(switches, True)})
        (folders[mode] / "config.json").write_text(served, encoding="utf-8")
    return folders


def opened(folder: Path, budget: int, tokens: int) -> Engine:
    """The model of one folder, with room for one prompt and its cached prefix."""
    blocks = 2 * (-(-tokens // BLOCK) + 1)
    return Engine.open(EngineConfig(folder, num_blocks=blocks, threads=THREADS, max_batch_tokens=budget))


def first_token(engine: Engine, prompt: tuple[int, ...], cache: bool) -> tuple[float, FirstToken]:
    """Seconds until a prompt's first token, and that token with its alternatives' log probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
    started = time.perf_counter()
    engine.submit(GenerateRequest("r", prompt, params, cache=cache))
    found: FirstToken | None = None
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            found = event if isinstance(event, FirstToken) else found
    if found is None:
        raise RuntimeError("the engine drew no token")
    return time.perf_counter() - started, found


def prefill_rows(folders: dict[str, Path], prompt: tuple[int, ...], repeat: int) -> Iterator[Row]:
    """A cold prefill with every row in every layer, and with the last window alone in the upper half."""
    for budget in BUDGETS:
        exact, replaying = (opened(folders[mode], budget, len(prompt)) for mode in ("exact", "decoder-side"))
        pairs = [[first_token(engine, prompt, False)[0] for engine in (exact, replaying)] for _ in range(repeat)]
        whole, trimmed = (statistics.median(times) for times in zip(*pairs, strict=True))
        yield Row(f"prefill, steps of {budget}: exact", whole, "s")
        yield Row(f"prefill, steps of {budget}: decoder-side replay", trimmed, "s")
        yield Row(f"prefill, steps of {budget}: decoder-side replay / exact", trimmed / whole, "x", BAR)


def hit_rows(folders: dict[str, Path], prompt: tuple[int, ...], repeat: int) -> Iterator[Row]:
    """The first token of a prompt whose last block alone is new: window restored from an anchor, or replayed."""
    for mode in ("exact", "encoder-side", "both"):
        times = []
        for _ in range(repeat):
            engine = opened(folders[mode], BUDGETS[0], len(prompt))
            first_token(engine, prompt[: len(prompt) - BLOCK + 1], True)
            seconds, first = first_token(engine, prompt, True)
            if first.cached_tokens < len(prompt) - 2 * BLOCK:
                raise RuntimeError(f"{mode}: only {first.cached_tokens} tokens were hit")
            times.append(seconds)
        held = engine.memory.index.anchors * engine.model.layout.window_bytes / 2**20
        yield Row(f"first token after a hit of {first.cached_tokens} tokens: {mode}", statistics.median(times), "s")
        yield Row(f"window state kept for it: {mode}", held, "MiB")


def deviation_rows(folders: dict[str, Path], prompt: tuple[int, ...]) -> Iterator[Row]:
    """How far the log probabilities of the 20 likeliest first tokens move; an exact hit moves nothing."""
    _, exact = first_token(opened(folders["exact"], BUDGETS[0], len(prompt)), prompt, False)
    for mode in MODES:
        engine = opened(folders[mode], BUDGETS[0], len(prompt))
        if mode != "decoder-side":
            first_token(engine, prompt[: len(prompt) - BLOCK + 1], True)
        _, found = first_token(engine, prompt, True)
        what = "cold" if mode == "decoder-side" else f"hit of {found.cached_tokens} tokens"
        yield Row(f"log probability moved, {mode}, {what}", moved(exact, found), "", 0 if mode == "exact" else None)


def moved(exact: FirstToken, found: FirstToken) -> float:
    """Largest difference over the tokens that both list; NaN if they share none."""
    if exact.logprob is None or found.logprob is None:
        raise RuntimeError("no log probabilities came back")
    wanted, other = (dict(first.logprob.top) for first in (exact, found))
    return max((abs(wanted[token] - other[token]) for token in wanted.keys() & other.keys()), default=float("nan"))


if __name__ == "__main__":
    sys.exit(main())
