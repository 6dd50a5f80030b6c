"""Log probabilities over the wire: what the engine said is what the gateway reads."""

from __future__ import annotations

import pytest

from engine.sampling.logprobs import TokenLogprob
from services.worker import wire


@pytest.mark.parametrize("top", [(), ((3, -0.5), (9, -1.0))])
def test_a_rank_beyond_the_alternatives_survives(top: tuple[tuple[int, float], ...]) -> None:
    logprob = TokenLogprob(77, -2.5, 41, top)
    packed = wire.pack_logprob(logprob)
    assert packed.rank == 41
    assert wire.unpack_logprob(packed) == logprob
