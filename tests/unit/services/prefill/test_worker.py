"""What a request left behind counts among what its worker has in hand, and hides nothing of the rest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from fabric.errors import Exhausted
from fabric.kvlink.leftovers import Leftovers
from services.prefill.ask import PrefillAsk
from services.prefill.worker import PrefillWorker
from tests.support.fakefamily import fake_engine

ASK = PrefillAsk("r", (5, 6, 7), SamplingParams(), b"", use_cache=True)


def worker(leftovers: Leftovers) -> PrefillWorker:
    """Of two requests at most."""
    tools: Any = SimpleNamespace(engine=SimpleNamespace(engine=fake_engine()), leftovers=leftovers)
    settings: Any = SimpleNamespace(max_waiting=1, max_sequences=1, max_prompt_tokens=0, watch_period_s=1.0)
    return PrefillWorker(tools, settings)


async def test_a_request_that_loads_is_seen_beside_blocks_that_another_one_left() -> None:
    leftovers, gate = Leftovers(10.0), asyncio.Event()
    one, stats = worker(leftovers), SimpleNamespace(waiting=0, running=0, held=1)
    leftovers.keep("gone", gate.wait())  # type: ignore[arg-type]
    one.live = 1
    assert one._outside(stats) == 1  # type: ignore[arg-type]
    one.live = 0
    assert one._outside(stats) == 0  # type: ignore[arg-type]
    await leftovers.aclose()


async def test_what_is_left_of_requests_counts_toward_the_bound() -> None:
    leftovers, gate = Leftovers(10.0), asyncio.Event()
    for name in ("a", "b"):
        leftovers.keep(name, gate.wait())  # type: ignore[arg-type]

    async def report(progress: object) -> None: ...

    with pytest.raises(Exhausted, match="2 requests are here already"):
        await worker(leftovers).run(ASK, asyncio.get_running_loop().create_future(), report)
    await leftovers.aclose()
