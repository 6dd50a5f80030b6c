"""The whole stack as real processes against the engine alone, same model, threads and requests, in one run.

`python -m bench.stack [--json PATH] [--model DIR]`. Rounds through the stack and on the engine alternate; medians are
compared. "Alone" is an engine stepped by a bare loop: no server, no thread, no tokens sent anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from bench.arguments import Parser, model_folder, new_file, positive
from bench.footprint import idle_percent, name_of
from bench.push import PUSH_BAR, measure, nano_prompt
from bench.streams import Alone, Gateway, Prompt, Trace, prompts, tokens_per_s
from bench.table import Row, report
from engine.config import EngineConfig
from engine.engine import Engine
from fabric.channels import Channels
from fabric.kvlink import ucx_lanes
from protos.deepinfer.v1 import gateway_pb2_grpc

NANO = Path(__file__).parents[1] / "models" / "nano"
CONCURRENT, PROMPT, NEW = 8, 256, 128
LONG_PROMPT, RUNNING, RUNNING_NEW = 8_000, 4, 6_000  # the running streams are cut when the long prompt is done
_WARM_TOKENS = 20
WORKER_THREADS = 1  # what `up` gives a worker on two cores
MACHINE_THREADS = 2  # what a single process may use there
BARS = {"throughput": 0.8, "first token": 20.0, "interference": 2.0, "memory": 4e3, "idle": 5.0}


@dataclass(frozen=True, slots=True)
class Up:
    """A running stack: where its gateway listens, what it serves, and its processes, `up` itself included."""

    address: str
    model: str
    processes: list[psutil.Process]


@contextmanager
def stack(model: Path, folder: Path) -> Iterator[Up]:
    """A stack of one prefill and one decode. Raises RuntimeError when it ends before it serves."""
    ready = folder / "ready.json"
    arguments = ["up", "--model", str(model), "--http-port", "0", "--ready-file", str(ready)]
    up = subprocess.Popen([sys.executable, "-m", "cli", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        if up.stdout is None or not any(line.startswith("ready:") for line in up.stdout):
            raise RuntimeError("the stack did not come up; its own message is above")
        record = json.loads(ready.read_text())
        processes = [psutil.Process(pid) for pid in (up.pid, *record["pids"].values())]
        yield Up(record["grpc"], record["model"], processes)
    finally:
        up.terminate()
        up.communicate(timeout=120)


def open_engine(model: Path, threads: int) -> Alone:
    """An engine with the settings of a worker."""
    return Alone(Engine.open(EngineConfig(model, threads=threads, max_batch_tokens=512, memory_bytes=256 << 20)))


async def throughput(gateway: Gateway, alone: Alone, vocabulary: int, rounds: int) -> list[Row]:
    """Streamed tokens per second of 8 requests at a time."""
    stacked, single = [], []
    for seed in range(rounds + 1):
        batch = prompts(CONCURRENT, PROMPT, vocabulary, seed)
        stacked.append(tokens_per_s(await gateway.streams(batch, NEW)))
        single.append(tokens_per_s(alone.streams(batch, NEW)))
    through, bare = statistics.median(stacked[1:]), statistics.median(single[1:])
    return [
        Row(f"{CONCURRENT} streams, {PROMPT}+{NEW} tokens: engine alone", bare, "tokens/s"),
        Row("  through the stack", through, "tokens/s"),
        Row("  stack / alone", through / bare, "", BARS["throughput"], ">="),
    ]


async def first_token(gateway: Gateway, alone: Alone, vocabulary: int, rounds: int) -> list[Row]:
    """Time to first token of one request at a time.

    What the stack adds is the p50 of the differences of the same prompt: a machine whose speed drifts from prompt to
    prompt moves both sides of a pair. The difference of the two medians stands beside it.
    """
    stacked, single = [], []
    for prompt in prompts(2 * rounds + 1, PROMPT, vocabulary, seed=1000):
        stacked.append((await gateway.stream(prompt, 2)).first_s)
        single.append(alone.streams([prompt], 2)[0].first_s)
    through, bare = 1e3 * statistics.median(stacked[1:]), 1e3 * statistics.median(single[1:])
    added = 1e3 * statistics.median(late - early for late, early in zip(stacked[1:], single[1:], strict=True))
    return [
        Row(f"first token, {PROMPT} tokens: engine alone", bare, "ms"),
        Row("  through the stack", through, "ms"),
        Row("  difference of the medians", through - bare, "ms"),
        Row("  added, p50", added, "ms", BARS["first token"]),
    ]


async def interference(gateway: Gateway, model: Path, vocabulary: int) -> list[Row]:
    """Inter-token p99 of 4 running streams from the arrival of a long prompt to its first token."""
    batch = prompts(RUNNING, PROMPT, vocabulary, seed=2000)
    (long,) = prompts(1, LONG_PROMPT, vocabulary, seed=2001)
    apart, apart_s = await _disturbed_stack(gateway, batch, long)
    together, together_s = _disturbed_engine(open_engine(model, MACHINE_THREADS), batch, long)
    return [
        Row(f"{RUNNING} streams while {LONG_PROMPT} tokens arrive: one process, p99", 1e3 * together, "ms"),
        Row("  disaggregated, p99", 1e3 * apart, "ms"),
        Row("  one process / disaggregated", together / apart, "", BARS["interference"], ">="),
        Row("  first token of the long prompt: one process", together_s, "s"),
        Row("  first token of the long prompt: disaggregated", apart_s, "s"),
    ]


async def _disturbed_stack(gateway: Gateway, batch: list[Prompt], long: Prompt) -> tuple[float, float]:
    traces: list[Trace] = []
    streams = [asyncio.ensure_future(gateway.stream(prompt, RUNNING_NEW, traces)) for prompt in batch]
    while len(traces) < len(batch) or min(trace.tokens for trace in traces) < _WARM_TOKENS:
        await asyncio.wait(streams, timeout=0.01)
    disturbance = await gateway.stream(long, 1)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return _p99(traces, disturbance), disturbance.first_s


def _disturbed_engine(alone: Alone, batch: list[Prompt], long: Prompt) -> tuple[float, float]:
    alone.streams(batch[:1], 4)  # compilers and page faults are not interference
    traces = [alone.submit(prompt, RUNNING_NEW) for prompt in batch]
    while min(trace.tokens for trace in traces) < _WARM_TOKENS:
        alone.step()
    disturbance = alone.submit(long, 1)
    while not disturbance.arrivals:
        alone.step()
    return _p99(traces, disturbance), disturbance.first_s


def _p99(traces: list[Trace], disturbance: Trace) -> float:
    """99th percentile of the gaps between messages while the disturbance was computed, in seconds."""
    end_s = disturbance.arrivals[0][0]
    return float(np.percentile([gap for trace in traces for gap in trace.gaps_s(disturbance.sent_s, end_s)], 99))


def footprint(up: Up, idle_s: float) -> list[Row]:
    """Memory of every process and idle CPU of all."""
    idle = idle_percent(up.processes, idle_s)
    memory = {name_of(process): process.memory_info().rss / 1e6 for process in up.processes}
    rows = [Row(f"  {name.rsplit(maxsplit=1)[0]}", size, "MB") for name, size in memory.items()]
    return [
        Row("memory of all processes", sum(memory.values()), "MB", BARS["memory"]),
        *rows,
        Row(f"idle CPU over {idle_s:.0f} s", sum(idle.values()), "% of a core", BARS["idle"]),
    ]


async def run(options: argparse.Namespace) -> list[Row]:
    """All figures, the stack's first."""
    rows: list[Row] = []
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    alone = open_engine(options.model, WORKER_THREADS)
    with tempfile.TemporaryDirectory() as folder, stack(options.model, Path(folder)) as up:
        async with Channels() as channels:
            gateway = Gateway(channels.stub(gateway_pb2_grpc.GatewayServiceStub, up.address), up.model)
            rows += await throughput(gateway, alone, vocabulary, options.rounds)
            rows += await first_token(gateway, alone, vocabulary, options.rounds)
            rows += await interference(gateway, options.model, vocabulary)
        await asyncio.sleep(3.0)  # the last statuses and leases are not idling
        rows += await asyncio.to_thread(footprint, up, options.idle_s)
    pushed, _ = await measure(nano_prompt(4096), 41, PUSH_BAR)
    return [*rows, *pushed]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=new_file, help="write the table as JSON, too")
    parser.add_argument("--model", type=model_folder, default=NANO, help="model directory")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds of each kind; medians are shown")
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds to watch the idle stack")
    options = parser.parse_args(arguments)
    ucx_lanes.prepare()
    return report("whole stack against the engine alone", asyncio.run(run(options)), options.json)


if __name__ == "__main__":
    sys.exit(main())
