"""The engine over V4.1, exact and with each bounded replay, switched on as an operator does: by config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.events import FirstToken, Preempted
from engine.requests import DecodeRequest, GenerateRequest
from engine.sampling.params import SamplingParams, SamplingState
from tests.support.driving import of, replayed, run, tokens_of
from tests.support.replays import replaying
from tests.support.tiny import Piece, batch_of, fresh_pool, random_tokens, run_in_chunks
from tests.unit.families.v41.material import DATA, opened

LONG, SHORT = tuple(random_tokens(300, 5, 511)), tuple(random_tokens(16, 6, 511))  # the window holds 16, a block 128
WINDOW = 16
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=12, ignore_eos=True)
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder of the tiny model with these switches."""

    def folder(*switches: str) -> Path:
        copy = Path(shutil.copytree(DATA / "tiny-q", tmp_path_factory.mktemp("models") / "tiny"))
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        served = config | {"serving": dict.fromkeys(switches, True)}
        (copy / "config.json").write_text(json.dumps(served), encoding="utf-8")
        return copy

    return folder


@pytest.fixture(scope="module")
def start(served: Callable[..., Path]) -> Open:
    """A fresh engine; folders are made once."""
    folders: dict[tuple[str, ...], Path] = {(): DATA / "tiny-q"}

    def start(*switches: str, **settings: object) -> Engine:
        folder = folders.setdefault(switches, folders.get(switches) or served(*switches))
        state = "auto" if switches else "exact"
        config = {"num_blocks": 24, "num_slots": 16, "batch_invariant": True, "threads": 1, "window_state": state}
        config |= settings
        return Engine.open(EngineConfig(folder, **config))

    return start


def answer(engine: Engine, prompt: tuple[int, ...], cache: bool = False, **sampling: object) -> list[int]:
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | sampling)
    engine.submit(GenerateRequest("r", prompt, chosen, cache=cache))
    return tokens_of(run(engine), "r")


def greedy_first(*pieces: tuple[int, int, int]) -> int:
    """The first token that the definition gives: each piece is (start, hit, first position above the last source)."""
    family = opened(DATA / "tiny-q")
    pool, blocks = fresh_pool(family), range(family.layout.blocks_for(len(LONG)))
    run_in_chunks(family, pool, LONG, len(LONG))
    logits = torch.empty(0)
    for slot, (start, hit, upper) in enumerate(pieces, 1):
        batch = batch_of([Piece(LONG[start:], start, blocks, slot)])
        batch.logit_rows.resize(1, refcheck=False)
        batch.logit_rows[0] = len(LONG) - start - 1
        logits = family.forward(replaying(batch, LONG, hit, upper), pool)
    return int(logits[-1].argmax())


def test_a_prefix_hit_without_replay_answers_exactly_as_a_cold_run(start: Open) -> None:
    cold, engine = answer(start(), LONG), start()
    assert answer(engine, LONG[:270], cache=True)
    before = engine.stats()
    assert answer(engine, LONG, cache=True) == cold
    assert engine.stats().cached_tokens - before.cached_tokens == 256
    assert engine.stats().anchors > 0


@pytest.mark.parametrize("switch", ["encoder_replay", "decoder_replay", "handoff_replay"])
def test_prompts_within_the_window_answer_exactly(switch: str, start: Open) -> None:
    assert answer(start(switch), SHORT) == answer(start(), SHORT)


def test_prompts_whose_every_row_is_asked_for_answer_exactly(start: Open) -> None:
    assert answer(start("decoder_replay"), LONG, prompt_logprobs=1) == answer(start(), LONG)


@pytest.mark.parametrize("budget", [17, 100, 512])
def test_decoder_replay_answers_from_the_last_window_for_every_budget(budget: int, start: Open) -> None:
    engine = start("decoder_replay", max_batch_tokens=budget, max_sequences=4)
    found = answer(engine, LONG)
    assert found[0] == greedy_first((0, 0, len(LONG) - WINDOW))
    assert found == answer(start("decoder_replay"), LONG), "depends on the chunks"


@pytest.mark.parametrize("switches", [("encoder_replay",), ("decoder_replay",), ("encoder_replay", "decoder_replay")])
@pytest.mark.parametrize("budget", [17, 512])
def test_a_hit_replays_one_window_and_writes_no_entry_again(
    switches: tuple[str, ...], budget: int, start: Open
) -> None:
    engine = start(*switches, max_batch_tokens=budget, max_sequences=4)
    answer(engine, LONG[:257], cache=True, max_tokens=1)
    hit = engine.lookup(LONG)
    assert (hit.hit_tokens, engine.stats().anchors) == (256, 0), "entries are all a hit needs"
    blocks = [engine.pool.blocks[block].clone() for block in engine.memory.match(engine._intake.chain(b"", LONG))]
    engine.memory.give(engine.memory.index.match(engine._intake.chain(b"", LONG)))
    computed = engine.stats().computed_tokens
    engine.submit(GenerateRequest("r", LONG, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)))
    (first,) = of(run(engine), FirstToken)
    assert first.cached_tokens == 256 - WINDOW
    assert engine.stats().computed_tokens - computed == len(LONG) - first.cached_tokens, "each token counts once"
    upper = len(LONG) - WINDOW if "decoder_replay" in switches else 0
    assert first.token == greedy_first((256 - WINDOW, 256, upper))
    again = engine.memory.index.match(engine._intake.chain(b"", LONG))
    assert all(torch.equal(engine.pool.blocks[block], old) for block, old in zip(again, blocks, strict=True))


def test_hits_no_longer_than_the_window_are_none(start: Open) -> None:
    engine = start("encoder_replay")
    engine.memory._replay_tokens = 128  # a window of one block
    answer(engine, LONG[:200], cache=True, max_tokens=1)
    assert engine.lookup(LONG[:200]).matched_blocks == 1
    assert engine.lookup(LONG[:200]).hit_tokens == 0


def test_a_preempted_replay_answers_the_same(start: Open) -> None:
    engine = start("encoder_replay", "decoder_replay", num_blocks=8)
    sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    prompts = [tuple(random_tokens(250 + shift, 50 + shift, 511)) for shift in range(3)]
    alone = []
    for prompt in prompts:
        engine.submit(GenerateRequest("alone", prompt, sampling, cache=False))
        alone.append(tokens_of(run(engine), "alone"))
    for number, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(f"r{number}", prompt, sampling, cache=False))
    events = run(engine)
    assert of(events, Preempted)
    assert [tokens_of(events, f"r{number}") for number in range(3)] == alone


@pytest.mark.parametrize("budget", [17, 512])
def test_entries_alone_are_handed_over_and_decode_draws_the_first_token(budget: int, start: Open) -> None:
    source = start("handoff_replay", max_batch_tokens=budget, max_sequences=4)
    target = start("handoff_replay", max_batch_tokens=budget, max_sequences=4)
    target.pool.slots.fill_(0xFF)  # nothing of a window may be read that was not replayed
    found = replayed(source, target, LONG, SAMPLED)
    assert len(found) == 12
    assert found == replayed(start("handoff_replay"), start("handoff_replay"), LONG, SAMPLED), "depends on the chunks"
    source.memory.check_idle()
    target.memory.check_idle()


def test_a_handed_over_prompt_within_the_window_answers_as_one_process_does(start: Open) -> None:
    found = replayed(start("handoff_replay"), start("handoff_replay"), SHORT, SAMPLED)
    assert found == answer(start(), SHORT, temperature=0.8, seed=7, max_tokens=12)


def test_decode_replays_over_a_prefix_that_it_held_already(start: Open) -> None:
    source, target = start("handoff_replay"), start("handoff_replay")
    replayed(source, target, LONG, SAMPLED, cache=True)
    assert target.lookup((*LONG, 3)).matched_blocks == 2
    empty = replayed(source, start("handoff_replay"), LONG, SAMPLED, cache=True)
    assert replayed(source, target, LONG, SAMPLED, cache=True) == empty


def test_a_model_that_hands_windows_over_refuses_a_replaying_decode(start: Open) -> None:
    engine = start("encoder_replay")
    engine.reserve("r", len(SHORT), 40)
    state = SamplingState(1, 0)
    with pytest.raises(InvalidParameter, match="replays"):
        engine.start_decode(DecodeRequest("r", SHORT, (), SamplingParams(max_tokens=4), state, replays=True))


def test_records_of_replaying_and_exact_engines_never_mix(start: Open) -> None:
    engines = [start(), start("encoder_replay"), start("decoder_replay"), start("handoff_replay")]
    assert len({engine.model.layout.fingerprint for engine in engines}) == 4
    assert len({engine.model.revision for engine in engines}) == 4
    assert len({engine.lookup(LONG).keys for engine in engines}) == 4
