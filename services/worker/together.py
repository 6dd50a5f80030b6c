"""Coroutines that live and die together. Knows nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

A = TypeVar("A")
B = TypeVar("B")


async def together(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Results of both. The first failure, or cancellation, cancels the other one, waits for its end and is raised."""
    one, two = asyncio.ensure_future(first), asyncio.ensure_future(second)
    try:
        await asyncio.wait((one, two), return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task for task in (one, two) if task.done() and task.exception() is not None), None)
        if failed is not None:
            await failed
        return await one, await two
    finally:
        for task in (one, two):
            task.cancel()
        await asyncio.gather(one, two, return_exceptions=True)


async def settled(work: Coroutine[Any, Any, A]) -> A:
    """The result of `work`, which has a deadline and must not be cut off: a caller that is cancelled, be it more than
    once, waits for its end."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # retrieved: the caller is gone, nobody else will
    raise cancelled
