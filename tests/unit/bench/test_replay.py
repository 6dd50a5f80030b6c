"""What bounded replay moves is measured over the tokens both list; its models differ in nothing but the mode."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bench.replay import MODES, main, moved, write_models
from engine.events import FirstToken
from engine.sampling.logprobs import TokenLogprob
from engine.sampling.params import SamplingState


def first(*top: tuple[int, float]) -> FirstToken:
    logprob = TokenLogprob(top[0][0], top[0][1], 1, top)
    return FirstToken("r", top[0][0], logprob, SamplingState(0, 1), None, 0, held=False, stop=None)


def test_the_largest_move_of_a_shared_token_counts() -> None:
    assert moved(first((1, -0.5), (2, -1.5)), first((2, -1.0), (1, -1.25))) == pytest.approx(0.75)
    assert moved(first((1, -0.5)), first((1, -0.5))) == 0
    assert math.isnan(moved(first((1, -0.5)), first((2, -0.5))))


def test_the_models_share_their_weights_and_differ_in_the_mode(tmp_path: Path) -> None:
    folders = write_models(tmp_path, 0)
    assert set(folders) == set(MODES)
    weights = {(folder / "model.safetensors").resolve() for folder in folders.values()}
    assert len(weights) == 1
    sections = {
        mode: json.loads((folder / "config.json").read_text()).get("serving", {}) for mode, folder in folders.items()
    }
    assert sections["exact"] == {} and sections["both"] == {"encoder_replay": True, "decoder_replay": True}


def test_a_prompt_too_short_to_hit_anything_is_refused() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--tokens", "100"])
    assert caught.value.code == 2
