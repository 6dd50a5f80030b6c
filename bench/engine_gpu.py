"""The engine's decode on one GPU: `python -m bench.engine_gpu`. Exit code 1 where the bar is missed.

A random model of V2-Lite's shape (16 B parameters, bf16, made on the device from a seed) decodes behind a
context of random latents, through `Engine.step`: schedule, one graph, commit. The floor is the time to read, at the
copy rate of this run, the weights that a step needs and the cached rows; at larger batches the weights of as many
experts as even choices would meet. `graph` is the device's own time of a step, without the engine around it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bench.arguments import Parser, new_file, positive
from bench.engine_gpu_model import random_model, weights_met
from bench.kernels_timing import copy_gb_per_s
from bench.table import Row, report
from engine.cache.pool import CachePool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Failed, TokensOut
from engine.families.mla.model import Mla
from engine.model import ModelInfo
from engine.requests import DecodeRequest
from engine.sampling.params import SamplingParams, SamplingState
from kernels import choose
from kernels.reference.records import LATENT_BYTES

BATCHES = (1, 32, 128)
BARS = {1: 0.6}  # batch -> share of the floor
BLOCK_TOKENS = 64


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, report."""
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="also write the table here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--context", type=positive, default=4096, help="tokens before the first that is decoded")
    parser.add_argument("--steps", type=positive, default=64, help="timed steps for each batch")
    parser.add_argument("--batch", type=positive, action="append", help=f"default: {BATCHES}")
    parser.add_argument("--kernels", default="triton", choices=("triton", "cuda"), help="whose operators")
    parser.add_argument("--kv-cache", default="rows", choices=("rows", "records"), help="in bf16, or as published")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0: tokens are drawn, not the likeliest")
    parser.add_argument("--top-p", type=float, default=1.0)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    rows = []
    for row in measured(options):
        print(f"{row.name}: {row.value:.4g} {row.unit} {row.verdict}", flush=True)  # a run that is cut short has told
        rows.append(row)
    title = f"engine on {torch.cuda.get_device_name()}, {options.kernels} kernels, {options.kv_cache}"
    title += f", context {options.context}"
    return report(title, rows, options.json)


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """Every figure as soon as it stands."""
    rate = copy_gb_per_s()
    yield Row("copy", rate, "GB/s")
    ops = choose(options.kernels, "cuda", records=options.kv_cache == "records")
    model = random_model(ops, options.seed, block_tokens=BLOCK_TOKENS)
    embedding = model.config.vocab_size * model.config.hidden
    yield Row("parameters", (weights_met(model.config, model.config.experts) + embedding) / 1e9, "billion")
    for batch in options.batch or BATCHES:
        engine = opened(model, batch, options.context + options.steps + 32)
        begin(engine, batch, options, options.temperature, options.top_p)
        step_ms = step_times(engine, options.steps)
        floor_ms = floor_bytes(model, batch, options.context) / rate / 1e6
        graph_ms = graph_time(engine)
        yield Row(f"batch {batch}: tokens/s", batch / step_ms * 1e3, "tokens/s")
        yield Row(f"batch {batch}: step", step_ms, "ms")
        yield Row(f"batch {batch}: graph", graph_ms, "ms")
        yield Row(f"batch {batch}: floor", floor_ms, "ms")
        yield Row(f"batch {batch}: share of the floor", floor_ms / step_ms, "", BARS.get(batch), ">=")
        del engine
        torch.cuda.empty_cache()


def opened(model: Mla, batch: int, tokens: int) -> Engine:
    """An engine with room for `batch` sequences of `tokens` tokens; every cached row is random."""
    config = EngineConfig(Path("random"), "bfloat16", max_sequences=batch, max_batch_tokens=max(512, 2 * batch))
    blocks = batch * model.layout.blocks_for(tokens)
    pool = CachePool(model.layout, blocks, batch + 1, torch.bfloat16, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(1)
    pages = pool.pages("latent", 0)
    for some in pages.storage.split(256):
        if pages.are_records:
            some.copy_(random_records(some.numel() // LATENT_BYTES, generator).view_as(some))
        else:
            some.normal_(generator=generator)
    info = ModelInfo(
        "random", "0" * 64, model.name, model.vocab_size, model.max_context_tokens, model.eos_token_ids, model.layout
    )
    return Engine(model, pool, info, config)


def random_records(count: int, generator: torch.Generator) -> torch.Tensor:
    """Latents of codes, scales and turned channels that are random each: uint8 [count, 656]."""
    codes = torch.randn(count, 512, generator=generator, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(count, 4, generator=generator, device="cuda") + 0.5
    turned = torch.randn(count, 64, generator=generator, device="cuda").bfloat16()
    return torch.cat([part.view(torch.uint8) for part in (codes, scales, turned)], 1)


def begin(
    engine: Engine, batch: int, options: argparse.Namespace, temperature: float = 0.0, top_p: float = 1.0
) -> None:
    """Sequences whose context counts as imported."""
    most = options.steps + 24
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=most, ignore_eos=True)
    draw = np.random.default_rng(options.seed)
    for index in range(batch):
        prompt = tuple(draw.integers(2, engine.model.vocab_size, options.context).tolist())
        engine.reserve(str(index), options.context, options.context + params.max_tokens)
        request = DecodeRequest(str(index), prompt, (2,), params, SamplingState(0, 1), cache=False)
        engine.start_decode(request)


def step_times(engine: Engine, steps: int, warm_up: int = 8) -> float:
    """Median milliseconds of a step, from before scheduling until its tokens are events."""
    times = []
    for _ in range(warm_up + steps):
        began = time.perf_counter()
        events = engine.step()
        times.append(time.perf_counter() - began)
        failed = [event.error for event in events if isinstance(event, Failed)]
        if failed or not any(isinstance(event, TokensOut) for event in events):
            raise RuntimeError(f"a step gave no tokens: {failed}")
    return statistics.median(times[warm_up:]) * 1e3


def graph_time(engine: Engine, rounds: int = 15) -> float:
    """Median milliseconds of the largest graph alone, replayed with the operands of its last step."""
    graphs = engine.graphs
    if graphs is None:
        raise RuntimeError("the engine captured nothing")
    pairs = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs.replay_largest()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def floor_bytes(model: Mla, batch: int, context: int) -> float:
    """Bytes that one step must read: weights once, of the experts those that are chosen, and every cached row."""
    config = model.config
    met = config.experts * (1 - (1 - config.experts_per_token / config.experts) ** batch)
    cached = batch * context * model.layout.block_bytes / model.layout.block_tokens
    return 2 * weights_met(config, met) + cached


if __name__ == "__main__":
    sys.exit(main())
