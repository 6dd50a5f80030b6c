"""The engine over tiny V2, V3 and V3.2: chunks, prefix hits and hand-offs answer as the plain run does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import ChunkDone, Finished, Preempted
from engine.requests import GenerateRequest, PrefillRequest
from engine.sampling.params import SamplingParams
from tests.support.driving import GREEDY, handoff, of, run, tokens_of, whole
from tests.support.tiny_mla import FAMILIES, TinySpec, write_tiny

HOT = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, max_tokens=12, ignore_eos=True, seed=4)
PROMPT = tuple((17 * place * place + 5 * place) % 509 + 3 for place in range(300))


def opened(folder: Path, **fields: object) -> Engine:
    settings = {"num_blocks": 24, "num_slots": 16, "max_sequences": 8, "batch_invariant": True, "threads": 1, **fields}
    return Engine.open(EngineConfig(folder, **settings))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp(request.param), TinySpec(request.param))


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[Engine, ...]:
    """Plain, chunked, and a prefill and a decode side: opened once, told apart by salt from test to test."""
    return opened(folder), opened(folder, max_batch_tokens=50), opened(folder), opened(folder)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_chunks_hits_and_handoff_equal_the_plain_run(
    engines: tuple[Engine, ...], length: int, sampling: SamplingParams
) -> None:
    plain, chunked, source, target = engines
    prompt, salt = PROMPT[:length], f"{length} {sampling.temperature}".encode()
    expected = whole(plain, prompt, sampling, cache=False)
    assert whole(chunked, prompt, sampling, salt=salt) == expected
    assert whole(chunked, prompt, sampling, salt=salt) == expected, "with a prefix hit"
    for turn in range(2):
        first, reservation = handoff(source, target, PrefillRequest("r", prompt, sampling, salt))
        assert [first.token, *tokens_of(run(target), "r")] == expected
        assert first.cached_tokens == ((length - 1) // 128 * 128 if turn else 0)
        assert reservation.held_tokens == (length // 128 * 128 if turn else 0)


def test_a_prompt_that_shares_only_a_first_block_hits_that_block(engines: tuple[Engine, ...]) -> None:
    """Nothing stands at a position: no anchor was taken at the first block's end, and none is needed."""
    engine, other = engines[1], (*PROMPT[:128], *PROMPT[5:100])
    expected = whole(engines[0], other, GREEDY, cache=False)
    whole(engine, PROMPT, GREEDY, salt=b"shared")
    engine.submit(GenerateRequest("whole", other, GREEDY, salt=b"shared"))
    events = run(engine)
    assert tokens_of(events, "whole") == expected
    (finished,) = of(events, Finished)
    assert finished.usage.cached_tokens == 128
    assert engine.stats().anchors == 0


def test_a_prompt_is_not_cut_where_an_anchor_would_stand(engines: tuple[Engine, ...]) -> None:
    engine = engines[2]
    engine.submit_prefill(PrefillRequest("whole", PROMPT, GREEDY, b"uncut"))
    events = run(engine)
    engine.release("whole")
    assert [event.computed_tokens for event in of(events, ChunkDone)] == [300]


def test_six_at_once_with_preemption_equal_each_alone(folder: Path, engines: tuple[Engine, ...]) -> None:
    prompts = [PROMPT[start * 9 : start * 9 + 120 + start] for start in range(6)]
    sampling = replace(HOT, max_tokens=16)
    alone = [whole(engines[0], prompt, sampling, cache=False) for prompt in prompts]
    engine = opened(folder, num_blocks=7, max_batch_tokens=64)
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(f"r{index}", prompt, sampling))
    events = run(engine)
    assert of(events, Preempted)
    assert [tokens_of(events, f"r{index}") for index in range(6)] == alone
