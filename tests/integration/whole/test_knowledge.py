"""What the gateway believes that real workers cache, over prompts that come and prompts that are pushed out."""

from __future__ import annotations

from pathlib import Path

from engine.sampling.params import SamplingParams
from services.gateway.build import build as build_gateway
from services.gateway.mirror import Knowledge
from services.gateway.pool import Pool
from services.gateway.settings import GatewaySettings
from tests.support.engines import evict_one, keys_of
from tests.support.frontstack import until
from tests.support.wholestack import WholeStack, start, whole_stack

GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
PROMPTS = [[3 + (5 * index + 7 * number) % 250 for index in range(400)] for number in range(12)]


def believed(pool: Pool) -> list[frozenset[bytes]]:
    entries = [*pool._prefill.values(), *pool._decode.values()]
    return sorted((frozenset(entry.standing.mirror.held) for entry in entries if entry.standing), key=sorted)


async def cached(stack: WholeStack) -> list[frozenset[bytes]]:
    return sorted([await keys_of(worker) for worker in stack.workers.values()], key=sorted)


async def test_what_is_exactly_known_is_what_the_workers_cache(model: Path) -> None:
    async with whole_stack(model, decodes=2) as stack:
        settings = GatewaySettings(discovery=stack.discovery, http="127.0.0.1:0")
        _, gateway = await start(stack.services, settings, build_gateway)
        pool: Pool = gateway._pool
        prefill = stack.workers["prefill"]
        for number, prompt in enumerate(PROMPTS):
            await stack.ask(prompt, GREEDY)
            if number % 4 == 3:
                await stack.until_idle(10.0)  # nobody holds the only blocks that could be forgotten
                keys = await keys_of(prefill)
                assert await evict_one(prefill)
                assert await keys_of(prefill) < keys

        async def agreed() -> bool:
            return believed(pool) == await cached(stack)

        await until(agreed, 10.0)
        assert pool.knowledge() == {Knowledge.EXACT: 3} and not pool.doubts
        assert sum(map(len, await cached(stack))) > len(PROMPTS)
