"""Warm-up: short requests, so that compiling kernels delays the start and not the first user. Knows no kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.events import Failed
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine


_LENGTHS = (6, 40, 300)  # of further prompts on a GPU: few, some and many rows take kernels of their own


def warm_up(engine: Engine) -> None:
    """Run them to their ends, one after another. Raises what one failed with."""
    limit = min(engine.memory.blocks.total * engine.memory.block_tokens, engine.model.max_context_tokens)
    further = _LENGTHS if engine.pool.blocks.is_cuda else ()
    for length in (engine.memory.block_tokens + 1, *further):
        params = SamplingParams(temperature=1.0 if further else 0.0, max_tokens=2, ignore_eos=True)
        _run(engine, GenerateRequest("warm-up", (0,) * min(length, limit - 2), params, cache=False))


def _run(engine: Engine, request: GenerateRequest) -> None:
    engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
