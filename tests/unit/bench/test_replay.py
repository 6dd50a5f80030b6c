"""What bounded replay moves is measured over the tokens both list; its models differ in nothing but the mode."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bench.replay import MODES, main, moved, write_models
from bench.window_state import POLICIES, Case, questions, text
from engine.events import FirstToken
from engine.families import open_family
from engine.sampling.logprobs import TokenLogprob
from engine.sampling.params import SamplingState
from kernels import choose
from models.nano.config import HERE


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
    assert sections["exact"] == {"encoder_replay": False}
    assert sections["both"] == {"encoder_replay": True, "decoder_replay": True}


@pytest.mark.parametrize("arguments", [["--tokens", "100"], ["--nano-tokens", "1152"], ["--nano-tokens", "9000"]])
def test_a_prompt_too_short_or_long_to_hit_anything_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_the_text_of_the_window_table_is_seeded_and_as_long_as_asked() -> None:
    assert text(300, 4) == text(300, 4) != text(300, 5)
    assert len(text(300, 4)) == 300


def test_the_window_table_compares_a_hit_with_the_cold_run_of_the_same_question() -> None:
    family = open_family(HERE, torch.float32, False, choose("auto"))
    (sample,) = questions(1400, 1, 2)
    assert 0.8 * 1400 <= sample.prompt_length <= 1400
    case = Case(family, sample)
    moves = {}
    for policy in POLICIES:
        found = case.after(policy)
        assert found.shape == case.cold.shape == (len(sample.ids) - sample.prompt_length, family.vocab_size)
        moves[policy] = float((case.cold - found).abs().max())
    assert moves["exact"] == moves["recompute"] == 0 < moves["replay"]
