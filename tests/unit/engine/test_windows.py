"""Each policy for window state through the engine: what a hit computes, answers and stores, and what is refused."""

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
from engine.events import FirstToken
from engine.families.mla import tiny as mla_tiny
from engine.families.v4.tiny import write_tiny
from engine.layout import CacheGroup, GroupKind, Layout
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams
from engine.windows import served
from tests.support.driving import of, run, tokens_of
from tests.support.tiny import random_tokens

V41 = Path(__file__).parents[2] / "data" / "v41" / "tiny-q"
NANO = Path(__file__).parents[3] / "models" / "nano"
LONG = tuple(random_tokens(330, 5, 511))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
RECOMPUTED = {  # model -> policy -> tokens; their windows hold 16 tokens in 7 and 12 layers
    "v4": {"exact": 0, "replay": 16, "recompute": 112},
    "v41": {"exact": 0, "replay": 16, "recompute": 192},
}
Open = Callable[..., Engine]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """A fresh engine with blocks of 16 tokens and an anchor after each."""
    folders = {"v4": write_tiny(tmp_path_factory.mktemp("models") / "tiny"), "v41": V41, "nano": NANO}

    def start(model: str, window_state: str, **settings: object) -> Engine:
        config = {"num_blocks": 64, "num_slots": 40, "block_tokens": 16, "anchor_every_blocks": 1, "threads": 1}
        config |= {"window_state": window_state, "batch_invariant": True} | settings
        return Engine.open(EngineConfig(folders[model], **config))

    return start


def answer(engine: Engine, prompt: tuple[int, ...], cache: bool = True) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt were cached."""
    engine.submit(GenerateRequest("r", prompt, GREEDY, cache=cache))
    events = run(engine)
    (first,) = of(events, FirstToken)
    return tokens_of(events, "r"), first.cached_tokens


def bytes_of(engine: Engine, prompt: tuple[int, ...]) -> list[torch.Tensor]:
    """The cached blocks of a prompt."""
    return [engine.pool.blocks[block].clone() for block in engine.memory.index.match(engine._intake.chain(b"", prompt))]


def branches(hits: range) -> list[tuple[int, tuple[int, ...]]]:
    """Prompts that share exactly so many tokens with LONG."""
    return [(hit, (*LONG[:hit], *random_tokens(21, hit, 511))) for hit in hits]


@pytest.mark.parametrize("model", ["v4", "v41"])
@pytest.mark.parametrize("policy", ["exact", "recompute"])
@pytest.mark.parametrize("budget", [48, 512])
def test_hits_at_many_boundaries_answer_as_a_cold_run(model: str, policy: str, budget: int, start: Open) -> None:
    cold, engine = start(model, "exact"), start(model, policy, max_batch_tokens=budget, max_sequences=4)
    answer(engine, LONG)
    for hit, prompt in branches(range(208, 321, 16)):
        assert answer(engine, prompt) == (answer(cold, prompt, cache=False)[0], hit - RECOMPUTED[model][policy])


@pytest.mark.parametrize("model", ["v4", "v41"])
@pytest.mark.parametrize("policy", ["exact", "replay", "recompute"])
@pytest.mark.parametrize("budget", [17, 512])
def test_a_hit_computes_what_its_policy_says_and_writes_no_cached_block(
    model: str, policy: str, budget: int, start: Open
) -> None:
    engine = start(model, policy, max_batch_tokens=budget, max_sequences=4)
    answer(engine, LONG[:257])
    before, computed = bytes_of(engine, LONG[:256]), engine.stats().computed_tokens
    assert len(before) == 16
    engine.submit(GenerateRequest("r", LONG, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)))
    (first,) = of(run(engine), FirstToken)
    assert first.cached_tokens == 256 - RECOMPUTED[model][policy]
    assert engine.stats().computed_tokens - computed == len(LONG) - first.cached_tokens, "each token counts once"
    assert all(torch.equal(*pair) for pair in zip(bytes_of(engine, LONG[:256]), before, strict=True))
    assert (engine.stats().anchors > 0) == (policy == "exact")


@pytest.mark.parametrize("model", ["v4", "v41"])
def test_a_replay_does_not_depend_on_the_chunks(model: str, start: Open) -> None:
    answers = []
    for budget in (17, 48, 512):
        engine = start(model, "replay", max_batch_tokens=budget, max_sequences=4)
        answer(engine, LONG[:257])
        answers.append(answer(engine, LONG))
    assert answers[0][1] == 256 - RECOMPUTED[model]["replay"]
    assert answers[1:] == answers[:1] * 2


@pytest.mark.parametrize("policy", ["replay", "recompute"])
def test_hits_no_longer_than_what_is_recomputed_are_none(policy: str, start: Open) -> None:
    engine, tokens = start("v4", policy), RECOMPUTED["v4"][policy]
    for length, hit in ((tokens, 0), (tokens + 16, tokens + 16)):
        prompt = (*LONG[:length], *random_tokens(5, length, 511))
        answer(engine, LONG)
        assert engine.lookup(prompt).hit_tokens == hit


def test_records_of_one_policy_are_never_another_ones(start: Open) -> None:
    for model in ("v4", "v41"):
        engines = [start(model, policy) for policy in ("exact", "replay", "recompute")]
        keys = [set(engine.lookup(LONG).keys) for engine in engines]
        assert len(set().union(*keys)) == sum(map(len, keys))
        assert len({engine.model.layout.fingerprint for engine in engines}) == 3
        assert len({engine.model.layout.records_fingerprint for engine in engines}) == 3


def test_what_a_family_is_served_with_unless_asked(start: Open) -> None:
    assert start("v4", "auto").model.layout.window_policy == "exact"
    assert start("v41", "auto").model.layout.window_policy == "replay"


def test_nano_hits_of_a_replay_are_near_and_of_the_others_equal(start: Open) -> None:
    """8 layers whose windows hold 128 tokens; a trained model, fed noise."""
    prompt = tuple(random_tokens(1300, 9, 3800))
    listing = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
    found: dict[str, dict[int, float]] = {}
    for policy in ("cold", "exact", "replay", "recompute"):
        engine = start("nano", "exact" if policy == "cold" else policy, block_tokens=128, num_blocks=16)
        if policy != "cold":
            answer(engine, prompt[:1281])
        engine.submit(GenerateRequest("r", prompt, listing))
        (first,) = of(run(engine), FirstToken)
        found_tokens = 0 if policy == "cold" else 1280 - engine.model.layout.replay.tokens
        assert first.cached_tokens == found_tokens and first.logprob is not None
        found[policy] = dict(first.logprob.top)
    assert found["exact"] == found["recompute"] == found["cold"]
    shared = found["cold"].keys() & found["replay"].keys()
    assert len(shared) >= 10
    assert 0 < max(abs(found["cold"][token] - found["replay"][token]) for token in shared) < 1


# --- what is refused


def test_a_model_without_windows_leaves_no_choice(tmp_path: Path) -> None:
    folder = mla_tiny.write_tiny(tmp_path / "tiny", mla_tiny.TinySpec("v3"))
    assert Engine.open(EngineConfig(folder, num_blocks=4, threads=1)).model.layout.window_policy == "exact"
    with pytest.raises(InvalidParameter) as caught:
        Engine.open(EngineConfig(folder, num_blocks=4, threads=1, window_state="replay"))
    assert (caught.value.field, caught.value.fix) == ("window_state", "leave it at auto")


@pytest.mark.parametrize("switch", ["decoder_replay", "handoff_replay"])
@pytest.mark.parametrize("policy", ["exact", "recompute"])
def test_a_checkpoint_that_trims_its_prompts_cannot_be_exact(switch: str, policy: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(V41, tmp_path / "tiny"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"serving": {switch: True}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InvalidParameter) as caught:
        Engine.open(EngineConfig(folder, num_blocks=4, threads=1, window_state=policy))
    assert caught.value.field == "window_state" and "decoder_replay" in caught.value.fix
    replaying = Engine.open(EngineConfig(folder, num_blocks=4, threads=1, window_state="replay")).model.layout.replay
    assert getattr(replaying, switch.removesuffix("_replay"))


def test_a_context_within_what_would_be_recomputed_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"max_position_embeddings": 112}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InvalidParameter, match="recomputes 112 tokens") as caught:
        Engine.open(EngineConfig(folder, num_blocks=4, threads=1, window_state="recompute"))
    assert caught.value.fix.startswith("use exact")


@pytest.mark.parametrize("policy", ["replay", "recompute"])
def test_a_window_that_does_not_refill_every_group_of_rows_is_refused(policy: str) -> None:
    window = CacheGroup("window", GroupKind.WINDOW, 1, 4, 1, 64, "float32", "w.1")
    state = CacheGroup("csa_state", GroupKind.WINDOW, 1, 8, 1, 64, "float32", "s.1")
    layout = Layout(16, 0, (window, state))
    with pytest.raises(InvalidParameter, match="csa_state holds rows of 8"):
        served(layout, policy, 4096)
    assert served(layout, "exact", 4096) == layout


def test_an_unknown_policy_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter) as caught:
        EngineConfig(tmp_path, window_state="anchors")
    assert (caught.value.field, caught.value.fix) == ("window_state", "use one of auto, exact, replay, recompute")
