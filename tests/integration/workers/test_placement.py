"""Several kvstore instances behind one Redis: each prefix has a home, hints lead past it, newcomers fill at a rate."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.prefix import PrefixIdentity, block_keys
from fabric.discovery import MemberInfo, open_discovery
from services.kvstore.index import Tier
from services.worker.stores import claim
from tests.support.manystores import Stores, several_stores
from tests.support.oracle import Oracle
from tests.support.servers import etcd_server
from tests.support.stack import Stack

TOKENS = [3 + index % 400 for index in range(700)]
WHOLE = (len(TOKENS) - 1) // 128 * 128
LONGER = [*TOKENS, *(5 + index % 300 for index in range(300))]


def prefix_keys(stack: Stack, tokens: list[int]) -> list[bytes]:
    model = stack.engine("prefill").model
    layout = model.layout
    identity = PrefixIdentity(model.revision, layout.fingerprint, "exact", layout.block_tokens)
    return block_keys(b"tenant", tokens, identity)


def first_key(stack: Stack) -> bytes:
    return prefix_keys(stack, TOKENS)[0]


def weaker_and_stronger(key: bytes) -> tuple[str, str]:
    """Two new names, the second of which is the home of `key` where both are there."""
    older, newer = sorted((uuid.uuid4().hex for _ in range(2)), key=lambda name: claim(name, key))
    return older, newer


async def told(stores: Stores, oracle: Oracle, tokens: list[int]) -> int:
    """Cached tokens of a request; what it left in stores is in Redis afterwards."""
    cached = await stores.asked(oracle, tokens)
    await stores.announced()
    return cached


@pytest.fixture(params=["memory", "etcd"])
def ways(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """How members find each other and bytes travel: within this process, or as in production."""
    if request.param == "memory":
        yield {}
        return
    with etcd_server(tmp_path) as etcd:
        yield {"discovery": etcd.url, "transport": "ucx://"}


async def test_a_prefix_whose_home_moved_is_found_where_it_was_and_then_at_home(
    model: Path, oracle: Oracle, tmp_path: Path, ways: dict[str, str]
) -> None:
    async with several_stores(model, tmp_path, **ways) as stores:
        older, newer = weaker_and_stronger(first_key(stores.stack))
        await stores.start(older)
        assert await told(stores, oracle, TOKENS) == 0
        await stores.start(newer)
        assert await told(stores, oracle, LONGER) == WHOLE  # by the hint
        assert stores.metric("prefill", "prefill_store_hints_total", result="useful") == 1
        assert stores.held(newer) >= stores.held(older) > 0  # it was filled on the way
        assert stores.metric(newer, "kvstore_fill_bytes_total") > 0
        await stores.stop(older)
        assert await told(stores, oracle, LONGER) >= WHOLE + 128  # at home
        assert stores.metric("prefill", "prefill_store_hints_total", result="useful") == 0


async def test_filling_is_bounded_and_what_is_new_goes_to_where_the_prefix_still_is(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with several_stores(model, tmp_path) as stores:
        older, newer = weaker_and_stronger(first_key(stores.stack))
        await stores.start(older)
        await told(stores, oracle, TOKENS)
        await stores.start(newer, fill_mb_per_s=1e-6)
        stores.stack.running[newer].servicer.store._filling.takes(1 << 20)  # as if much had come a moment ago
        before = stores.held(older)
        assert await told(stores, oracle, LONGER) == WHOLE
        assert (stores.held(newer), stores.metric(newer, "kvstore_fill_redirected_total")) == (0, 1)
        assert stores.held(older) > before
        assert await told(stores, oracle, LONGER) >= WHOLE + 128  # the longer prefix is one hint away


async def test_what_nobody_held_before_is_never_held_back(model: Path, oracle: Oracle, tmp_path: Path) -> None:
    async with several_stores(model, tmp_path) as stores:
        older, newer = weaker_and_stronger(first_key(stores.stack))
        await stores.start(older)
        await stores.start(newer, fill_mb_per_s=1e-6)
        stores.stack.running[newer].servicer.store._filling.takes(1 << 20)
        assert await told(stores, oracle, TOKENS) == 0
        assert (stores.held(older), stores.metric(newer, "kvstore_fill_redirected_total")) == (0, 0)
        assert await told(stores, oracle, TOKENS) == WHOLE


async def test_losing_one_store_loses_its_hits_and_the_next_one_takes_its_prefixes(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with several_stores(model, tmp_path) as stores:
        older, newer = weaker_and_stronger(first_key(stores.stack))
        await stores.start(older)
        await stores.start(newer)
        await told(stores, oracle, TOKENS)
        assert (stores.held(older), stores.held(newer) > 0) == (0, True)
        await stores.stop(newer)
        assert await told(stores, oracle, TOKENS) == 0
        assert await told(stores, oracle, TOKENS) == WHOLE


async def test_a_hint_to_one_that_does_not_answer_costs_what_it_had_alone(
    model: Path, oracle: Oracle, tmp_path: Path
) -> None:
    async with several_stores(model, tmp_path) as stores:
        ghost, home = weaker_and_stronger(first_key(stores.stack))
        await stores.start(home)
        assert await told(stores, oracle, TOKENS) == 0
        store = stores.stack.running[home].servicer.store
        index = store._hints._index
        await index.mark(ghost, "run", 60.0)
        await index.publish(dict.fromkeys(prefix_keys(stores.stack, LONGER), Tier.DRAM), ghost, "run")
        async with open_discovery(stores.discovery).register(MemberInfo("kvstore", ghost, "127.0.0.1:1", 1)):
            assert await told(stores, oracle, LONGER) == WHOLE
        assert stores.metric("prefill", "prefill_store_hints_total", result="stale") == 1
