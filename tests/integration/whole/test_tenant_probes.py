"""A tenant that probes another's prompts learns nothing: not from the usage it is told, not from how long it waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.support.promises import Recorder
from tests.support.tenantstack import TenantStack, tenant_stack

PROBES, ROUNDS = 200, 3


def same_by_chance(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p of Mann and Whitney's test: how likely two samples of one distribution lie at least so far apart."""
    ranks = np.concatenate([one, other]).argsort().argsort()[: len(one)] + 1
    distance = ranks.sum() - len(one) * (len(one) + len(other) + 1) / 2
    spread = math.sqrt(len(one) * len(other) * (len(one) + len(other) + 1) / 12)
    return math.erfc(abs(distance) / spread / math.sqrt(2))


class Probing:
    """B asks what A has just asked, what nobody has, and what it has itself asked just before."""

    def __init__(self, stack: TenantStack, seed: int) -> None:
        self._stack, self._random = stack, Random(seed)
        self.cached_tokens = 0
        self.stolen_s: list[float] = []
        self.cold_s: list[float] = []
        self.own_s: list[float] = []

    async def once(self) -> None:
        secret, fresh = ("".join(self._random.choices("abcdefgh ", k=600)) for _ in range(2))
        await self._ask("a", secret)
        for text, took_s in self._random.sample([(secret, self.stolen_s), (fresh, self.cold_s)], 2):
            cached, waited_s = await self._ask("b", text)
            took_s.append(waited_s)
            self.cached_tokens += cached
        self.own_s.append((await self._ask("b", secret))[1])

    async def _ask(self, tenant: str, text: str) -> tuple[int, float]:
        told = await self._stack.chat(tenant, text, max_tokens=1)
        return told.cached_tokens, told.took_s


@pytest.mark.slow
@pytest.mark.promise(37)
async def test_200_probes_of_anothers_prompts_learn_nothing(model: Path, tmp_path: Path, promise: Recorder) -> None:
    """By chance one round in a hundred looks as if it had told something; what is told is told in each of three."""
    chances: list[float] = []
    async with tenant_stack(model, tmp_path, ("a", "b")) as stack:
        while len(chances) < ROUNDS and max(chances, default=0.0) <= 0.01:
            probing = Probing(stack, seed=len(chances))
            for _ in range(PROBES):
                await probing.once()
            assert same_by_chance(probing.own_s, probing.cold_s) < 1e-6, "a hit cannot be told from a miss here"
            promise(37, f"{PROBES} probes of another's prompts: cached tokens", probing.cached_tokens, exactly=0)
            chances.append(same_by_chance(probing.stolen_s, probing.cold_s))
    what = f"{PROBES} probes, waiting as for a prompt that nobody had: Mann-Whitney p, best of {ROUNDS} rounds at most"
    promise(37, what, max(chances), at_least=0.01)
