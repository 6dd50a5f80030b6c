"""A front stack for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.support.frontstack import FrontStack, front_stack


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[FrontStack]:
    async with front_stack(tmp_path) as running:
        yield running


@pytest_asyncio.fixture
async def two_pairs(tmp_path: Path) -> AsyncIterator[FrontStack]:
    async with front_stack(tmp_path, prefills=2, decodes=2) as running:
        yield running
