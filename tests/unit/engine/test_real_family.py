"""The engine over a real, tiny V4: the same lives as over the fake family, with every real cache group."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.checkpoint.errors import CheckpointError
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Finished, FirstToken, Preempted
from engine.families.v4.tiny import write_tiny
from engine.requests import GenerateRequest, PrefillRequest
from engine.sampling.params import SamplingParams
from tests.support.driving import handoff, of, run, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
HOT = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, max_tokens=12, ignore_eos=True, seed=4)
PROMPT = tuple((17 * place * place + 5 * place) % 509 + 3 for place in range(300))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


def opened(model_dir: Path, **fields: object) -> Engine:
    settings = {"num_blocks": 24, "num_slots": 16, "max_sequences": 8, "batch_invariant": True, "threads": 1, **fields}
    return Engine.open(EngineConfig(model_dir, **settings))


def whole(engine: Engine, prompt: tuple[int, ...], sampling: SamplingParams, **fields: object) -> list[int]:
    engine.submit(GenerateRequest("r", prompt, sampling, **fields))
    return tokens_of(run(engine), "r")


@pytest.fixture(scope="module")
def engines(model_dir: Path) -> tuple[Engine, ...]:
    """Plain, chunked, and a prefill and a decode side: opened once, told apart by salt from test to test."""
    return opened(model_dir), opened(model_dir, max_batch_tokens=50), opened(model_dir), opened(model_dir)


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


def test_six_at_once_with_preemption_equal_each_alone(model_dir: Path, engines: tuple[Engine, ...]) -> None:
    prompts = [PROMPT[start * 9 : start * 9 + 120 + start] for start in range(6)]
    sampling = replace(HOT, max_tokens=16)
    alone = [whole(engines[0], prompt, sampling, cache=False) for prompt in prompts]
    engine = opened(model_dir, num_blocks=7, max_batch_tokens=64)
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(f"r{index}", prompt, sampling))
    events = run(engine)
    assert of(events, Preempted)
    assert [tokens_of(events, f"r{index}") for index in range(6)] == alone


def test_the_model_tells_its_facts(engines: tuple[Engine, ...]) -> None:
    engine = engines[0]
    assert engine.model.family == "deepseek_v4" and engine.model.name == "tiny" and engine.model.vocab_size == 512
    assert len(engine.model.revision) == 64
    engine.submit(GenerateRequest("r", PROMPT[:200], replace(GREEDY, prompt_logprobs=0, max_tokens=1)))
    events = run(engine)
    assert len(of(events, FirstToken)[0].prompt_logprobs) == 200
    assert of(events, Finished)[0].usage.prompt_tokens == 200


def test_a_broken_checkpoint_is_refused_at_opening(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "broken")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        opened(folder)
