"""Requests to replay against a KV cache: Mooncake traces and seeded agent sessions. Knows blocks, no cache."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt at `time_s`: the blocks it looks up, and those that are offered once it was answered."""

    time_s: float
    tokens: int  # of the prompt
    looked_up: tuple[int, ...]
    offered: tuple[int, ...]
    block_tokens: int

    def hit_tokens(self, blocks: int) -> int:
        """Prompt tokens that `blocks` leading blocks stand for."""
        return min(blocks * self.block_tokens, self.tokens)


class BadTrace(ValueError):
    """A line of the trace is not a request; says which and why."""


def read_trace(path: Path) -> list[Request]:
    """Requests of a trace in Mooncake's format: JSON lines with timestamp (ms), input_length, hash_ids.

    Raises:
        BadTrace: a line that is no such request, or that goes back in time. OSError: the file cannot be read.
    """
    requests: list[Request] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            request = _parse(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise BadTrace(f"{path}:{number}: {error!r}; expected timestamp, input_length and hash_ids") from error
        if requests and request.time_s < requests[-1].time_s:
            raise BadTrace(f"{path}:{number}: timestamp is before the line above it; sort the trace by time")
        requests.append(request)
    if len(requests) < 2:
        raise BadTrace(f"{path}: fewer than two requests; half of the trace warms the cache")
    return requests


def _parse(line: dict[str, Any]) -> Request:
    blocks = tuple(int(block) for block in line["hash_ids"])
    tokens = int(line["input_length"])
    if not blocks or tokens < 1:
        raise ValueError("a request without blocks or tokens")
    return Request(float(line["timestamp"]) / 1000, tokens, blocks, blocks, MOONCAKE_BLOCK)


@dataclass(frozen=True, slots=True)
class AgentShape:
    """Sessions of an agent: one prefix common to all, a first turn, then turns that continue everything before."""

    sessions: int = 24
    common_tokens: int = 20_000
    first_tokens: int = 10_000
    turns: int = 30
    input_tokens: int = 2_048
    output_tokens: int = 900
    block_tokens: int = 128
    pause_s: float = 30.0  # mean time between an answer and the next turn
    between_s: float = 120.0  # mean time between two sessions' starts

    def prompt_tokens(self, turn: int) -> int:
        """Tokens of the prompt of a turn, counted from 0: all earlier turns and their answers are in it."""
        return self.common_tokens + self.first_tokens + turn * (self.input_tokens + self.output_tokens)

    @property
    def ideal(self) -> float:
        """Share of prompt tokens that an infinite cache of single tokens would hit, the very first prompt aside."""
        prompts = sum(self.prompt_tokens(turn) for turn in range(self.turns))
        return 1 - (self.first_tokens + (self.turns - 1) * self.input_tokens) / prompts


def agent_sessions(shape: AgentShape, seed: int) -> list[Request]:
    """All turns of all sessions in time order; equal seeds give equal requests."""
    chance = random.Random(seed)
    starts: list[float] = []
    for _ in range(shape.sessions):
        starts.append((starts[-1] if starts else 0.0) + chance.expovariate(1 / shape.between_s))
    requests = [turn for index, start in enumerate(starts) for turn in _session(shape, index, start, chance)]
    return sorted(requests, key=lambda request: request.time_s)


def _session(shape: AgentShape, index: int, start: float, chance: random.Random) -> Iterator[Request]:
    common = shape.common_tokens // shape.block_tokens
    last = (shape.prompt_tokens(shape.turns - 1) + shape.output_tokens) // shape.block_tokens
    first_own = common + index * (last - common)
    blocks = tuple(range(common)) + tuple(range(first_own, first_own + last - common))
    time_s = start
    for turn in range(shape.turns):
        tokens = shape.prompt_tokens(turn)
        offered = blocks[: (tokens + shape.output_tokens) // shape.block_tokens]
        yield Request(time_s, tokens, blocks[: tokens // shape.block_tokens], offered, shape.block_tokens)
        time_s += chance.expovariate(1 / shape.pause_s)


def working_set(requests: list[Request]) -> int:
    """Blocks that will be used again at the busiest moment: what a cache must hold to lose no hit."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, request in enumerate(requests):
        for block in request.offered:
            first.setdefault(block, index)
        for block in request.looked_up:
            last[block] = index
    change = [0] * (len(requests) + 1)
    for block, index in first.items():
        change[index] += 1
        change[last.get(block, index) + 1] -= 1
    live = most = 0
    for step in change:
        live += step
        most = max(most, live)
    return most
