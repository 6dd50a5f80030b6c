"""Front stacks: one shared by the tests that leave it whole, fresh ones for those that break it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.frontstack import FrontStack, front_stack

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A shared stack needs one event loop for all tests here."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontStack]:
    async with front_stack(tmp_path_factory.mktemp("front")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def stack(shared_stack: FrontStack) -> AsyncIterator[FrontStack]:
    """The shared stack as if it had just started; it must be idle again afterwards."""
    shared_stack.forget()
    await shared_stack.until_ready()
    yield shared_stack
    shared_stack.script.let_go()
    await shared_stack.until_idle(10.0)


@pytest_asyncio.fixture(loop_scope="session")
async def own_stack(tmp_path: Path) -> AsyncIterator[FrontStack]:
    async with front_stack(tmp_path) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def two_pairs(tmp_path: Path) -> AsyncIterator[FrontStack]:
    async with front_stack(tmp_path, prefills=2, decodes=2) as running:
        yield running
