"""The engine on a GPU with the triton kernels: the reference's greedy tokens, and graphs that change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import FirstToken, TokensOut
from engine.families.tiny import write
from engine.requests import GenerateRequest
from engine.sampling.logprobs import TokenLogprob
from engine.sampling.params import SamplingParams
from kernels.choose import missing_for
from tests.support.driving import run, tokens_of

pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NANO = Path(__file__).parents[3] / "models" / "nano"
BACKENDS = [name for name in ("triton", "cuda") if not torch.cuda.is_available() or not missing_for(name, "cuda")]
PROMPTS, NEW = 50, 8
NEAR = 1e-3  # log probabilities that fp32 sums in another order may put in another order


def opened(folder: Path, kernels: str, device: str = "cuda", graphs: bool = True) -> Engine:
    config = EngineConfig(folder, num_blocks=160, kernels=kernels, device=device, max_sequences=16, graphs=graphs)
    return Engine.open(config)


def greedy(
    engine: Engine, logprobs: int | None = None, prompts: int = PROMPTS
) -> dict[str, list[tuple[int, TokenLogprob | None]]]:
    """Tokens of prompts of one to sixty tokens, and what the sampler said of each where it is asked to."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=logprobs)
    draw = np.random.default_rng(0)
    for number in range(prompts):
        prompt = tuple(draw.integers(3, engine.model.vocab_size, 1 + number * 59 // (prompts - 1)).tolist())
        engine.submit(GenerateRequest(str(number), prompt, params, cache=False))
    tokens: dict[str, list[tuple[int, TokenLogprob | None]]] = {str(number): [] for number in range(prompts)}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, FirstToken):
                tokens[event.request_id].append((event.token, event.logprob))
            elif isinstance(event, TokensOut):
                tokens[event.request_id] += zip(event.token_ids, event.logprobs or [None], strict=True)
    return tokens


def agreeing(engine: Engine, reference: Engine, prompts: int, near: float) -> float:
    """The share of prompts whose tokens are equal up to a near tie of the reference's own log probabilities."""
    found, expected, agree = greedy(engine, prompts=prompts), greedy(reference, 2, prompts), 0
    for name, told in expected.items():
        pairs = zip((token for token, _ in found[name]), told, strict=True)
        first = next((logprob for mine, (theirs, logprob) in pairs if mine != theirs), None)
        agree += first is None or abs(first.top[0][1] - first.top[1][1]) < near
    return agree / prompts


def assert_same_tokens(engine: Engine, reference: Engine, prompts: int = PROMPTS, near: float = NEAR) -> None:
    """Equal tokens, but for those behind a near tie of the reference's own log probabilities."""
    found, expected = greedy(engine, prompts=prompts), greedy(reference, 2, prompts)
    for name, told in expected.items():
        for (mine, _), (theirs, logprob) in zip(found[name], told, strict=True):
            if mine != theirs:
                assert logprob is not None and abs(logprob.top[0][1] - logprob.top[1][1]) < near, name
                break


@pytest.mark.parametrize("family", ["v2", "v3", "v32", "v4", "v41"])
def test_tiny_models_give_the_references_tokens_on_a_gpu(family: str, tmp_path: Path) -> None:
    folder = write(family, tmp_path / "model")
    reference = opened(folder, "reference", "cpu")
    for kernels in BACKENDS:
        engine = opened(folder, kernels)
        assert engine.graphs is not None, "its decode steps are captured"
        assert_same_tokens(engine, reference)


def test_nano_gives_the_references_tokens_on_a_gpu() -> None:
    reference = opened(NANO, "reference", "cpu")
    for kernels in BACKENDS:
        assert_same_tokens(opened(NANO, kernels), reference)


def test_the_reference_runs_on_a_gpu(tmp_path: Path) -> None:
    folder = write("v3", tmp_path / "model")
    assert_same_tokens(opened(folder, "reference"), opened(folder, "reference", "cpu"), prompts=8)


def test_graphs_change_no_token(tmp_path: Path) -> None:
    folder = write("v3", tmp_path / "model")
    captured, plain = opened(folder, "triton"), opened(folder, "triton", graphs=False)
    assert captured.graphs is not None and plain.graphs is None
    assert greedy(captured) == greedy(plain)


@pytest.mark.parametrize("family", ["v3", "v32"])
def test_steps_queued_ahead_change_no_token(family: str, tmp_path: Path) -> None:
    """Sequences that begin together, pass the ends of blocks and end one after another, some by a stop."""
    folder = write(family, tmp_path / "model")
    captured, plain = opened(folder, "triton"), opened(folder, "triton", graphs=False)
    found = []
    for engine in (captured, plain):
        draw = np.random.default_rng(0)
        for number in range(12):
            prompt = tuple(draw.integers(3, engine.model.vocab_size, 100 + number).tolist())
            stops = tuple(range(100, 110)) if number % 2 else ()
            params = SamplingParams(temperature=0.0, max_tokens=20 + 3 * number, ignore_eos=True, stop_token_ids=stops)
            engine.submit(GenerateRequest(str(number), prompt, params, cache=False))
        events = run(engine)
        found.append({str(number): tokens_of(events, str(number)) for number in range(12)})
    assert found[0] == found[1]
    assert {len(tokens) for tokens in found[0].values()} > {20, 38}


def test_padding_rows_of_a_graph_touch_nothing(tmp_path: Path) -> None:
    engine = opened(write("v4", tmp_path / "model"), "triton")
    assert engine.graphs is not None
    engine.pool.blocks.fill_(0xFF)
    engine.pool.slots.fill_(0xFF)
    engine.graphs.replay_empty()
    torch.cuda.synchronize()
    assert bool((engine.pool.blocks == 0xFF).all()) and bool((engine.pool.slots == 0xFF).all())
