"""The single-process engine as the truth: what a request must answer, whatever serves it. Knows no services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Failed, FirstToken, TokensOut
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Case:
    """One seeded request."""

    number: int
    tokens: tuple[int, ...]
    sampling: SamplingParams


def cases(count: int, max_tokens: int, vocabulary: int, seed: int) -> list[Case]:
    """Prompts of 1 to `max_tokens` tokens; every third one continues an earlier prompt, every second one is sampled."""
    rng = np.random.default_rng(seed)
    made: list[Case] = []
    for number in range(count):
        length = int(rng.integers(1, max_tokens + 1))
        tokens = rng.integers(3, vocabulary, length).tolist()
        if number % 3 == 2:
            earlier = made[int(rng.integers(0, number))].tokens
            tokens = [*earlier, *tokens][: max(length, min(len(earlier) + 1, max_tokens))]
        temperature = 0.0 if number % 2 else 0.8
        sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=number, max_tokens=12, ignore_eos=True)
        made.append(Case(number, tuple(tokens), sampling))
    return made


class Oracle:
    """Runs every case alone and cold: no batch, no cache, one chunk size of its own."""

    def __init__(self, model: Path) -> None:
        self._engine = Engine.open(EngineConfig(model, batch_invariant=True, threads=1, max_batch_tokens=512))

    def answer(self, tokens: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The tokens that must come out."""
        request = GenerateRequest("oracle", tuple(tokens), sampling, cache=False)
        self._engine.submit(request)
        output: list[int] = []
        while self._engine.has_work:
            for event in self._engine.step():
                match event:
                    case FirstToken():
                        output.append(event.token)
                    case TokensOut():
                        output.extend(event.token_ids)
                    case Failed():
                        raise event.error
        return output
