"""The engine inside a worker, read and changed on its own thread: from any other it may stand in mid-step."""

from __future__ import annotations

from typing import Any

from engine.runner import EngineRunner
from engine.stats import EngineStats

_HELD = ("waiting", "running", "held", "reserved", "loading", "offers", "blocks_held", "slots_held")


def runner_of(servicer: Any) -> EngineRunner:
    """The thread of a worker's engine. What the engine never changes (its model, its layout) may be read without it."""
    runner: EngineRunner = servicer.core.engine
    return runner


async def stats_of(servicer: Any) -> EngineStats:
    runner = runner_of(servicer)
    return await runner.call(runner.engine.stats)


async def held_by(servicer: Any) -> dict[str, int]:
    """What requests and offers have of an engine now; empty if nothing."""
    stats = await stats_of(servicer)
    return {name: count for name in _HELD if (count := getattr(stats, name))}


async def keys_of(servicer: Any) -> frozenset[bytes]:
    """Keys of the blocks that an engine caches."""
    runner = runner_of(servicer)
    return await runner.call(lambda: runner.engine.memory.index.keys)


async def evict_one(servicer: Any) -> bool:
    """Makes an engine forget the cached block that it would evict next; False if there is none."""
    runner = runner_of(servicer)
    return await runner.call(runner.engine.memory.index.evict_block)


async def forget(servicer: Any) -> None:
    """Makes an engine forget all that it caches."""
    while await evict_one(servicer):
        pass
