"""Workers whose engine's memory is not the host's, as on a GPU: answers and hits are those of one process all the same.

The device is stood in for by other memory of the CPU: nothing gets there and back but by `fetch` and `upload`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cache import pool
from engine.cache.staging import HostCopy
from engine.sampling.params import SamplingParams
from tests.support.oracle import Oracle
from tests.support.stack import worker_stack

TOKENS = [3 + index % 400 for index in range(700)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_is_apart", lambda _device: True)


@pytest.mark.parametrize("transport", ["inproc://", "tcp://127.0.0.1:0", "ucx://"])
async def test_cold_own_and_stored_prefixes_answer_as_one_process_does(
    model: Path, oracle: Oracle, transport: str
) -> None:
    expected = oracle.answer(TOKENS, GREEDY)
    async with worker_stack(model, transport=transport) as stack:
        assert stack.running["decode"].servicer.core.engine.engine.pool.is_apart
        assert (await stack.ask(TOKENS, GREEDY)).tokens == expected
        await stack.idle()
        await stack.restart("prefill")
        for _ in range(2):  # what the store has, then what prefill has of its own
            answer = await stack.ask(TOKENS, GREEDY)
            assert answer.tokens == expected and answer.done is not None
            assert answer.done.usage.cached_tokens == (len(TOKENS) - 1) // 128 * 128
            await stack.idle()


@pytest.mark.parametrize("way", ["fetch", "upload"])
async def test_either_way_is_needed(model: Path, oracle: Oracle, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopy, way, lambda _copy, _rows: None)
    async with worker_stack(model, transport="inproc://") as stack:
        assert (await stack.ask(TOKENS, GREEDY)).tokens != oracle.answer(TOKENS, GREEDY)
