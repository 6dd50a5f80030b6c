"""The engine over V4.1 with decoder-side replay, switched on as an operator does: by the model's config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams
from tests.support.driving import run, tokens_of
from tests.support.tiny import random_tokens
from tests.unit.families.v41.material import DATA

LONG, SHORT = tuple(random_tokens(200, 5, 511)), tuple(random_tokens(16, 6, 511))  # the window holds 16


@pytest.fixture(scope="module")
def exact() -> Engine:
    return opened(DATA / "tiny-q")


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = Path(shutil.copytree(DATA / "tiny-q", tmp_path_factory.mktemp("models") / "tiny"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"serving": {"decoder_replay": True}}), encoding="utf-8")
    return opened(folder)


def opened(folder: Path) -> Engine:
    return Engine.open(EngineConfig(folder, num_blocks=24, num_slots=16, batch_invariant=True, threads=1))


def answer(engine: Engine, prompt: tuple[int, ...], **sampling: object) -> list[int]:
    chosen = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, **sampling)
    engine.submit(GenerateRequest("r", prompt, chosen, cache=False))
    return tokens_of(run(engine), "r")


def test_prompts_within_the_window_answer_exactly(exact: Engine, replaying: Engine) -> None:
    assert answer(replaying, SHORT) == answer(exact, SHORT)


def test_prompts_whose_every_row_is_asked_for_answer_exactly(exact: Engine, replaying: Engine) -> None:
    assert answer(replaying, LONG, prompt_logprobs=1) == answer(exact, LONG)


def test_a_long_prompt_is_answered_from_its_last_window(replaying: Engine) -> None:
    """Approximate by design, so it may differ; it must still be a whole answer, and the same every time."""
    first = answer(replaying, LONG)
    assert len(first) == 24
    assert answer(replaying, LONG) == first


def test_records_of_replaying_and_exact_engines_never_mix(exact: Engine, replaying: Engine) -> None:
    assert exact.model.layout.fingerprint != replaying.model.layout.fingerprint
    assert exact.model.revision != replaying.model.revision
