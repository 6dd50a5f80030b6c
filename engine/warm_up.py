"""Warm-up: one short request, so that compiling kernels delays the start and not the first user. Knows no kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.events import Failed
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine


def warm_up(engine: Engine) -> None:
    """Run it to its end. Raises what it failed with."""
    limit = min(engine.memory.blocks.total * engine.memory.block_tokens, engine.model.max_context_tokens)
    prompt = (0,) * min(engine.memory.block_tokens + 1, limit - 2)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine.submit(GenerateRequest("warm-up", prompt, params, cache=False))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
