"""Greedy generation by an engine that nobody else uses, for timing it. Knows no peer."""

from __future__ import annotations

from collections.abc import Sequence

from engine.engine import Engine
from engine.events import Failed, FirstToken, TokensOut
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams


def generate(engine: Engine, given: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Continuations of all prompts at once, without the prefix cache. Raises the error of a request that failed."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for index, prompt in enumerate(given):
        engine.submit(GenerateRequest(str(index), tuple(prompt), params, cache=False))
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(given))}
    for event in finish(engine):
        tokens[event.request_id] += (event.token,) if isinstance(event, FirstToken) else event.token_ids
    return list(tokens.values())


def finish(engine: Engine) -> list[FirstToken | TokensOut]:
    """Step until nothing is left to do; the tokens that came."""
    events: list[FirstToken | TokensOut] = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, FirstToken | TokensOut):
                events.append(event)
    return events
