"""Leftovers: what goes on after the call that began it, and what has to wait for its end. Knows no link, no memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fabric.errors import ServiceError
from fabric.telemetry import logs

ResultT = TypeVar("ResultT")
_log = logs.get("kvlink")
_REMEMBERED = 1024  # owners whose work failed, for callers that still have to be told


@dataclass(slots=True, eq=False)
class _Rest:
    """What is left of one call."""

    tasks: set[asyncio.Task[bool]] = field(default_factory=set)
    over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    then: list[Callable[[], None]] = field(default_factory=list)


class Leftovers:
    """The one owner of work that its callers do not wait for, such as a write that cannot be revoked and the word that
    it was the last. Work ends by itself; what does not is cancelled after `most_s` seconds."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._left: dict[str, _Rest] = {}
        self._failed: OrderedDict[str, None] = OrderedDict()
        self.done = 0  # calls of which nothing is left any more

    @property
    def pending(self) -> int:
        """Calls of which something is left: what a drain waits for."""
        return len(self._left)

    def keep(self, owner: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end. Its failure is logged, and told to who asks `over`."""
        rest = self._left.setdefault(owner, _Rest())
        # A fresh context: the call's deadline is over or near, this work has its own.
        task = asyncio.create_task(self._bounded(work), name=f"rest of {owner}", context=Context())
        rest.tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(owner, rest, ended))

    def after(self, owner: str, then: Callable[[], None]) -> None:
        """Calls `then` once nothing of `owner` is left; at once where nothing is."""
        rest = self._left.get(owner)
        if rest is None:
            then()
        else:
            rest.then.append(then)

    async def over(self, owner: str) -> bool:
        """Waits until nothing of `owner` is left; whether all of it, now or before, ended as it should. A caller that
        is cancelled leaves it as it is."""
        rest = self._left.get(owner)
        if rest is not None:
            await asyncio.shield(rest.over)
        return owner not in self._failed

    async def aclose(self) -> None:
        """Cuts off what is left, at the end of the process; safe to repeat."""
        tasks = [task for rest in self._left.values() for task in rest.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bounded(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether it ended as it should."""
        try:
            async with asyncio.timeout(self._most_s):
                await work
        except (TimeoutError, ServiceError) as error:
            _log.warning("not ended as it should", error=type(error).__name__)
            return False
        return True

    def _ended(self, owner: str, rest: _Rest, task: asyncio.Task[bool]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("defect", error=type(error).__name__, frames=logs.frames(error))
        if task.cancelled() or task.exception() is not None or not task.result():
            self._failed[owner] = None
            if len(self._failed) > _REMEMBERED:
                self._failed.popitem(last=False)
        rest.tasks.discard(task)
        if rest.tasks:
            return
        del self._left[owner]
        self.done += 1
        rest.over.set_result(None)
        for then in rest.then:
            then()


async def to_its_end(work: Coroutine[Any, Any, ResultT] | asyncio.Task[ResultT]) -> ResultT:
    """Runs `work`, which ends by itself, to its end even when the caller is cancelled, be it more than once."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return await task
    if not task.cancelled():
        task.exception()  # retrieved: the caller is gone, nobody else will
    raise cancelled
