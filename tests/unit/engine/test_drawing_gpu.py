"""Tokens drawn on a GPU: the host's, alone and among others."""

from __future__ import annotations

import pytest
import torch

from engine.sampling.logits import Logits
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
