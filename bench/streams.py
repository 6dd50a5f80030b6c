"""Streams: one request each, through a stack or on an engine alone, with the time of every message. Judges nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from engine.engine import Engine
from engine.events import Failed, FirstToken, TokensOut
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams
from protos.deepinfer.v1 import common_pb2, gateway_pb2

Prompt = tuple[int, ...]
FIRST_ORDINARY_TOKEN = 64  # below are special tokens


def prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[Prompt]:
    """Seeded prompts that share no prefix."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(FIRST_ORDINARY_TOKEN, vocabulary, tokens).tolist()) for _ in range(count)]


@dataclass(slots=True)
class Trace:
    """When a request was sent, and when which number of tokens arrived (seconds of one clock)."""

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def first_s(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0] - self.sent_s

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Time between messages that arrived from `start_s` to `end_s`."""
        return [late - early for (early, _), (late, _) in pairwise(self.arrivals) if start_s <= late <= end_s]


class Gateway:
    """Requests through a whole stack, over gRPC."""

    def __init__(self, stub: Any, model: str) -> None:
        self._stub, self._model = stub, model

    async def stream(self, prompt: Prompt, new: int, traces: list[Trace] | None = None) -> Trace:
        """One request to its last token, kept out of every cache. Its trace joins `traces` at once, to be looked at."""
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        request = gateway_pb2.GatewayServiceGenerateRequest(
            model=self._model, token_ids=gateway_pb2.TokenIds(ids=prompt), sampling=sampling, use_cache=False
        )
        trace = Trace(time.perf_counter())
        if traces is not None:
            traces.append(trace)
        async for reply in self._stub.Generate(request, timeout=300):
            if reply.token_ids:
                trace.arrivals.append((time.perf_counter(), len(reply.token_ids)))
        return trace

    async def streams(self, batch: Sequence[Prompt], new: int) -> list[Trace]:
        """All at once."""
        return list(await asyncio.gather(*(self.stream(prompt, new) for prompt in batch)))


class Alone:
    """Requests on an engine that this process steps itself: no thread, no network, nobody in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._traces: dict[str, Trace] = {}

    def submit(self, prompt: Prompt, new: int) -> Trace:
        """Queues one request; its trace fills while `step` runs."""
        request_id = f"alone-{len(self._traces)}"
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        trace = self._traces[request_id] = Trace(time.perf_counter())
        self._engine.submit(GenerateRequest(request_id, prompt, params, cache=False))
        return trace

    def step(self) -> None:
        """One engine step."""
        for event in self._engine.step():
            match event:
                case FirstToken():
                    self._traces[event.request_id].arrivals.append((time.perf_counter(), 1))
                case TokensOut():
                    self._traces[event.request_id].arrivals.append((time.perf_counter(), len(event.token_ids)))
                case Failed():
                    raise event.error

    def finish(self) -> None:
        """Steps until nothing is left."""
        while self._engine.has_work:
            self.step()

    def streams(self, batch: Sequence[Prompt], new: int) -> list[Trace]:
        """All at once."""
        traces = [self.submit(prompt, new) for prompt in batch]
        self.finish()
        return traces


def tokens_per_s(traces: Sequence[Trace]) -> float:
    """Tokens of all streams over the time from the first request to the last token."""
    started, ended = min(trace.sent_s for trace in traces), max(trace.arrivals[-1][0] for trace in traces)
    return sum(trace.tokens for trace in traces) / (ended - started)
