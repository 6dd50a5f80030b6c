"""A model is unknown only where workers are there and none of them names it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from uuid import uuid4

import pytest

from fabric.discovery import MemberInfo, open_discovery
from fabric.errors import NotFound, Unavailable
from fabric.lifecycle import background
from services.gateway.follower import Patience
from services.gateway.pool import Pool, _incarnation
from services.gateway.router import Router
from tests.support.frontstack import until

NOBODY_LISTENS = "127.0.0.1:1"


@asynccontextmanager
async def pool_of(*members: MemberInfo) -> AsyncIterator[Pool]:
    """A pool that has heard of these members; none of them answers."""
    discovery = open_discovery(f"memory://{uuid4().hex}")
    pool = Pool(discovery, Router(Random(0)), Patience(1.0, 6.0))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(background(pool.run(), "pool"))
        for member in members:
            await stack.enter_async_context(discovery.register(member))
        await until(lambda: len(pool._prefill) + len(pool._decode) == len(members), 10.0)
        yield pool


def worker(service: str, model: str) -> MemberInfo:
    return MemberInfo(service, f"{service}-1", NOBODY_LISTENS, 1, model=model)


async def test_before_any_worker_is_known_no_model_is_called_unknown() -> None:
    async with pool_of() as pool:
        with pytest.raises(Unavailable) as caught:
            pool.limits("m")
        assert caught.value.retry_after_s


@pytest.mark.parametrize("named", ["m", ""])
async def test_a_model_whose_workers_do_not_answer_is_unavailable(named: str) -> None:
    async with pool_of(worker("prefill", named), worker("decode", "other")) as pool:
        with pytest.raises(Unavailable):
            pool.limits("m")
        with pytest.raises(Unavailable):
            pool.served("m")


async def test_a_model_that_no_worker_names_is_unknown() -> None:
    async with pool_of(worker("prefill", "other"), worker("decode", "other")) as pool:
        with pytest.raises(NotFound) as caught:
            pool.limits("m")
        assert caught.value.field == "model"


def test_a_reservation_names_its_writer_only_where_discovery_knows_incarnations() -> None:
    named = _incarnation(MemberInfo("prefill", "p", NOBODY_LISTENS, 7, process="b n p 1 2"))
    assert named is not None and (named.instance, named.epoch, named.process) == ("p", 7, "b n p 1 2")
    assert _incarnation(MemberInfo("prefill", "p", NOBODY_LISTENS, 0)) is None
