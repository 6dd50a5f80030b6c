"""Where prefixes live: membership decides alone, moves as few as possible, and who is silent is passed over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from uuid import uuid4

import pytest

from fabric.channels import Channels
from fabric.discovery import MemberInfo, open_discovery
from fabric.errors import Unavailable
from fabric.lifecycle import background
from services.worker.stores import Stores

KEYS = [number.to_bytes(32) for number in range(1000)]


@asynccontextmanager
async def members(names: Sequence[str]) -> AsyncIterator[Stores]:
    """The stores that somebody sees who found these members in this order."""
    discovery = open_discovery(f"memory://{uuid4().hex}")
    async with AsyncExitStack() as stack:
        stores = Stores(discovery, await stack.enter_async_context(Channels()))
        for name in names:
            await stack.enter_async_context(discovery.register(MemberInfo("kvstore", name, "127.0.0.1:1", 1)))
        await stack.enter_async_context(background(stores.follow(), "stores"))
        async with asyncio.timeout(5.0):
            while any(stores.named(name) is None for name in names):  # noqa: ASYNC110 - discovery tells nobody else
                await asyncio.sleep(0)
        yield stores


def homes(stores: Stores) -> list[str]:
    found = [stores.home(key) for key in KEYS]
    return [store.instance if store is not None else "" for store in found]


async def homes_of(*names: str) -> list[str]:
    async with members(names) as stores:
        return homes(stores)


async def test_everybody_agrees_and_every_store_has_its_share() -> None:
    one, other = await homes_of("a", "b", "c", "d"), await homes_of("d", "b", "a", "c")
    assert one == other
    assert all(150 <= count <= 350 for count in Counter(one).values())


async def test_a_newcomer_takes_its_share_and_moves_nothing_else() -> None:
    before, after = await homes_of("a", "b", "c"), await homes_of("a", "b", "c", "new")
    moved = [home for was, home in zip(before, after, strict=True) if was != home]
    assert set(moved) == {"new"} and 150 <= len(moved) <= 350


async def test_who_leaves_moves_its_own_prefixes_alone() -> None:
    before, after = await homes_of("a", "b", "c"), await homes_of("a", "c")
    assert all(was == home for was, home in zip(before, after, strict=True) if was != "b")
    assert {home for was, home in zip(before, after, strict=True) if was == "b"} == {"a", "c"}


async def test_a_silent_store_is_passed_over_as_if_it_were_not_there() -> None:
    async with members(("a", "b", "c")) as stores:
        store = stores.named("b")
        assert store is not None
        with pytest.raises(Unavailable), stores.asking(store):
            raise Unavailable("no answer")
        assert homes(stores) == await homes_of("a", "c")
        assert stores.named("b") is None


async def test_without_stores_nothing_has_a_home() -> None:
    async with members(()) as stores:
        assert stores.home(KEYS[0]) is None
