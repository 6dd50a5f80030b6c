"""Keeps the processes of a stack running. Knows tasks, members and a way to start them; draws nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cli.member import Member, State
from cli.restarts import RestartPolicy
from cli.task import Endpoints, Task

# A process that misses so many looks in a row is restarted. Together longer than any drain, in which services call
# themselves unhealthy, and than any stall of a busy machine.
_LOOK_EVERY_S = 10.0
_MISSES = 6


LATE = "did not serve in time"


class Process(Protocol):
    """A started process, as `cli.child.Child` is one."""

    pid: int

    @property
    def exit_reason(self) -> str | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    async def wait(self, timeout_s: float) -> bool: ...


Start = Callable[[Task], Awaitable[Process]]


@dataclass(frozen=True, slots=True)
class Row:
    """One process as it stands, for a table or a file. since: when it entered its state, on the supervisor's clock."""

    task: Task
    state: State
    since: float
    pid: int | None
    restarts: int
    reason: str
    endpoints: Endpoints


class Supervised:
    """A task with its state and, while it runs, its process. Touched by the supervisor alone."""

    def __init__(self, task: Task, policy: RestartPolicy, start_timeout_s: float) -> None:
        self.task = task
        self.member = Member(task.name, policy, start_timeout_s)
        self.process: Process | None = None
        self.endpoints = Endpoints()
        self.looked_at, self.misses = 0.0, 0

    def row(self) -> Row:
        member, pid = self.member, self.process.pid if self.process else None
        return Row(self.task, member.state, member.since, pid, member.restarts, member.reason, self.endpoints)


class Supervisor:
    """Starts tasks when what they need serves, restarts what ends, and drains them in order.

    start: starts the process of a task. clock: seconds, monotonic.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        start: Start,
        clock: Callable[[], float],
        policy: RestartPolicy,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._start = start
        self._clock = clock
        self._all = {task.name: Supervised(task, policy, start_timeout_s) for task in tasks}

    def rows(self) -> list[Row]:
        return [one.row() for one in self._all.values()]

    @property
    def serving(self) -> bool:
        """Whether every process serves."""
        return all(one.member.state is State.SERVING for one in self._all.values())

    @property
    def failed(self) -> Row | None:
        """The first process that failed for good, if one has."""
        return next((one.row() for one in self._all.values() if one.member.state is State.FAILED), None)

    async def tick(self) -> None:
        """One look at every process: notices ends, starts what is due, probes what is starting."""
        await asyncio.gather(*(self._advance(one) for one in self._all.values()))

    async def drain(self, grace_s: float) -> None:
        """Stops all processes, rank after rank; whatever has not ended `grace_s` after it was told to is killed."""
        for rank in sorted({one.task.drain_rank for one in self._all.values()}):
            group = [one for one in self._all.values() if one.task.drain_rank == rank]
            await asyncio.gather(*(self._stop(one, grace_s) for one in group))

    def kill(self) -> None:
        """Ends all processes at once."""
        for one in self._all.values():
            if one.process is not None:
                one.process.kill()

    async def _advance(self, one: Supervised) -> None:
        if one.process is not None and one.process.exit_reason is not None:
            self._bury(one, one.process.exit_reason)
        if one.member.overdue(self._clock()) and one.process is not None:
            one.process.kill()
            await one.process.wait(timeout_s=5)
            self._bury(one, LATE)
        if one.member.due(self._clock()) and self._needs_met(one.task):
            await self._launch(one)
        if one.member.state is State.STARTING:
            await self._probe(one)
        elif one.member.state is State.SERVING:
            await self._look(one)

    def _needs_met(self, task: Task) -> bool:
        return all(self._all[name].member.state is State.SERVING for name in task.needs)

    async def _launch(self, one: Supervised) -> None:
        one.task.reset()
        one.member.started(self._clock())
        try:
            one.process = await self._start(one.task)
        except OSError as error:
            one.member.ended(self._clock(), f"cannot be run: {error}")

    async def _probe(self, one: Supervised) -> None:
        endpoints = await one.task.probe()
        # It may have ended while the probe ran; the next tick sees that.
        if endpoints is not None and one.process is not None and one.process.exit_reason is None:
            one.endpoints, one.looked_at, one.misses = endpoints, self._clock(), 0
            one.member.served(self._clock())

    async def _look(self, one: Supervised) -> None:
        """A process that is there but serves nobody is as gone as one that ended."""
        if one.task.alive is None or self._clock() - one.looked_at < _LOOK_EVERY_S:
            return
        one.looked_at = self._clock()
        one.misses = 0 if await one.task.alive(one.endpoints) else one.misses + 1
        if one.misses >= _MISSES and one.process is not None:
            one.process.kill()
            await one.process.wait(timeout_s=5)
            self._bury(one, "stopped serving")

    def _bury(self, one: Supervised, reason: str) -> None:
        if one.process is not None:
            one.process.kill()  # what it may have left in its group
        one.process, one.endpoints = None, Endpoints()
        one.member.ended(self._clock(), reason, hopeless=reason in one.task.hopeless)

    async def _stop(self, one: Supervised, grace_s: float) -> None:
        one.member.drained(self._clock())
        process = one.process
        if process is not None:
            process.terminate()
            if not await process.wait(grace_s):
                process.kill()
                await process.wait(timeout_s=5)
        if one.member.state is State.DRAINING:
            self._bury(one, "")
