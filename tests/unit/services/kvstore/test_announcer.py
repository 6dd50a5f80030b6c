"""What is told to the index: the truth of each key, at once when it changes, at a bounded rate when it was lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from services.kvstore import announcer as announcing
from services.kvstore.announcer import Announcer, Pace
from services.kvstore.index import IndexLost, Tier
from services.kvstore.index_memory import MemoryIndex
from tests.support.clock import FakeClock

KEYS = [number.to_bytes(32, "little") for number in range(2000)]
RATE = 1000.0


class Flaky(MemoryIndex):
    """Answers while `up`; everything it knew can be lost."""

    up = True

    async def mark(self, instance: str, run: str, ttl_s: float) -> bool:
        self._require()
        return await super().mark(instance, run, ttl_s)

    async def publish(self, held: Mapping[bytes, Tier], instance: str, run: str) -> None:
        self._require()
        await super().publish(held, instance, run)

    async def withdraw(self, keys: Sequence[bytes], instance: str) -> None:
        self._require()
        await super().withdraw(keys, instance)

    async def unmark(self, instance: str, run: str) -> None:
        self._require()
        await super().unmark(instance, run)

    def lose_everything(self) -> None:
        self._holders.clear()
        self._marks.clear()

    def _require(self) -> None:
        if not self.up:
            raise IndexLost


class World:
    """One announcer, what it holds, and the index it tells."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.index = Flaky(3600.0, self.clock)
        self.holds: dict[bytes, Tier] = {}
        self.announcer = Announcer(self.index, "me", "run", Pace(3600.0, RATE), self.clock)
        self.announcer.where, self.announcer.held = self.holds.get, lambda: self.holds

    async def told(self) -> dict[bytes, Tier]:
        """What the index says that "me" holds."""
        leads = [(key, lead) for key in KEYS for lead in await self.index.holders([key]) if lead.instance == "me"]
        return {key: Tier.DRAM if lead.in_memory else Tier.NVME for key, lead in leads}

    async def settle(self, seconds: float = 60.0) -> None:
        """Steps through `seconds`, faster than any rate."""
        for _ in range(round(seconds / 0.25)):
            await self.announcer.step()
            self.clock.advance(0.25)


@pytest.fixture
def world() -> World:
    return World()


async def test_what_is_held_at_the_start_is_told(world: World) -> None:
    world.holds.update(dict.fromkeys(KEYS[:10], Tier.NVME))
    await world.announcer.step()
    assert await world.told() == world.holds


async def test_a_change_is_told_as_it_is_when_it_is_told(world: World) -> None:
    await world.announcer.step()
    world.holds[KEYS[0]] = Tier.DRAM
    world.announcer.changed(KEYS[:2])
    world.holds[KEYS[0]] = Tier.NVME
    await world.announcer.step()
    assert await world.told() == {KEYS[0]: Tier.NVME}
    del world.holds[KEYS[0]]
    world.announcer.changed(KEYS[:1])
    await world.announcer.step()
    assert await world.told() == {}


async def test_an_index_that_lost_everything_is_told_anew(world: World) -> None:
    world.holds.update(dict.fromkeys(KEYS, Tier.DRAM))
    await world.settle()
    assert await world.told() == world.holds
    world.index.lose_everything()
    await world.settle()
    assert await world.told() == world.holds
    assert world.announcer.counts.passes == 2


async def test_telling_anew_keeps_its_rate_and_changes_do_not_wait_for_it(world: World) -> None:
    world.holds.update(dict.fromkeys(KEYS, Tier.DRAM))
    await world.announcer.step()
    started, most = world.clock(), 0.0
    world.announcer.changed(KEYS[:3])
    while world.announcer.waiting:
        await world.announcer.step()
        assert world.announcer.counts.announced == 3
        most = world.announcer.counts.reannounced - RATE * (world.clock() - started)
        assert most <= 1024
        world.clock.advance(0.01)
    assert world.clock() - started >= (len(KEYS) - 1024) / RATE


async def test_what_changed_while_the_index_was_away_is_told_when_it_is_back(world: World) -> None:
    world.holds[KEYS[0]] = Tier.DRAM
    await world.announcer.step()
    world.index.up = False
    world.holds[KEYS[1]] = Tier.DRAM
    del world.holds[KEYS[0]]
    world.announcer.changed(KEYS[:2])
    for _ in range(3):
        with pytest.raises(IndexLost):
            await world.announcer.step()
    world.index.up = True
    await world.announcer.step()
    assert await world.told() == {KEYS[1]: Tier.DRAM}


async def test_everything_is_told_again_before_it_expires(world: World) -> None:
    world.holds.update(dict.fromkeys(KEYS[:10], Tier.DRAM))
    await world.settle(10.0)
    for _ in range(10):
        world.clock.advance(3600.0 / 4)
        await world.announcer.step()
        assert await world.told() == world.holds


async def test_who_leaves_is_named_no_more_and_an_index_that_is_away_does_not_keep_it(world: World) -> None:
    world.holds[KEYS[0]] = Tier.DRAM
    await world.announcer.step()
    world.index.up = False
    await world.announcer.leave()
    world.index.up = True
    await world.announcer.leave()
    assert await world.told() == {}


async def test_more_changes_than_may_wait_become_one_pass_over_everything(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcing, "MAX_CHANGED", 100)
    await world.announcer.step()
    world.holds.update(dict.fromkeys(KEYS, Tier.DRAM))
    world.announcer.changed(KEYS)
    assert world.announcer.waiting == 0
    await world.settle()
    assert await world.told() == world.holds
