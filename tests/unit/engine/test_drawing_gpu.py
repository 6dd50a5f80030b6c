"""Tokens drawn on a GPU: the host's, alone and among others, and behind captured steps those of plain ones."""

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
from engine.sampling.logits import Logits
from engine.sampling.params import SamplingParams
from tests.unit.engine.test_drawing import ASKED, OTHERS, rows_of

pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# Of draws: weights are exponentials in fp32, and a point within their rounding of a bound falls to the other side.
SAME = 0.99


@pytest.mark.parametrize("vocabulary", [640, 129_280])
def test_tokens_are_the_hosts(vocabulary: int) -> None:
    rows = rows_of((*ASKED, *OTHERS), 100)
    logits = torch.randn(100, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    logits[3, 5], logits[14, 9] = torch.nan, torch.inf
    places = torch.randperm(100, generator=torch.Generator().manual_seed(1)).tolist()
    found = [choice.token for choice in Logits(logits.cuda()).choose(places, rows, (1,))]
    expected = [choice.token for choice in Logits(logits).choose(places, rows, (1,))]
    assert found.count(None) == 2
    assert sum(mine == theirs for mine, theirs in zip(found, expected, strict=True)) >= SAME * len(rows)


def test_a_row_has_the_same_token_alone_and_among_others() -> None:
    rows, logits = rows_of(ASKED, 64), (torch.randn(64, 5000, generator=torch.Generator().manual_seed(2)) * 3).cuda()
    together = Logits(logits).choose(list(range(64)), rows, ())
    for place in range(64):
        assert Logits(logits[place : place + 1]).choose([0], rows[place : place + 1], ()) == [together[place]]


HOT = (
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 0.7, "min_p": 0.05, "stop_token_ids": tuple(range(100, 110))},
    {"temperature": 0.0},
)
MIXED = (*HOT, {"temperature": 0.9, "frequency_penalty": 0.4}, {"temperature": 0.6, "logprobs": 2})


def drawn_by(engine: Engine, kinds: tuple[dict[str, object], ...]) -> tuple[dict[str, list[int]], int]:
    """Tokens of twelve sequences that pass the ends of blocks and end one after another, and how many steps were
    queued ahead."""
    draw, tokens, ahead = np.random.default_rng(0), {}, 0
    for number in range(12):
        params = SamplingParams(
            **kinds[number % len(kinds)], seed=number * 7919 + 5, max_tokens=20 + 3 * number, ignore_eos=True
        )  # type: ignore[arg-type]
        prompt = tuple(draw.integers(3, engine.model.vocab_size, 100 + number).tolist())
        engine.submit(GenerateRequest(str(number), prompt, params, cache=False))
        tokens[str(number)] = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, FirstToken):
                tokens[event.request_id].append(event.token)
            elif isinstance(event, TokensOut):
                tokens[event.request_id] += event.token_ids
        ahead += engine.graphs is not None and engine.graphs._ahead is not None
    return tokens, ahead


@pytest.mark.parametrize("kinds", [HOT, MIXED], ids=["a token alone", "more of some"])
def test_tokens_drawn_behind_captured_steps_are_those_of_plain_ones(kinds: tuple, tmp_path: Path) -> None:
    folder, found = write("v3", tmp_path / "model"), []
    for graphs in (True, False):
        config = EngineConfig(folder, num_blocks=160, kernels="triton", device="cuda", max_sequences=16, graphs=graphs)
        found.append(drawn_by(Engine.open(config), kinds))
    (captured, ahead), (plain, _) = found
    assert captured == plain
    assert len({tuple(tokens[:8]) for tokens in captured.values()}) == 12, "sequences go ways of their own"
    assert (ahead > 15) == (kinds is HOT), "steps are queued ahead where a token is all that is wanted of every row"
