"""Health that follows real progress. Knows counters of work done and work waiting, not what the work is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from fabric.telemetry import logs

_log = logs.get("health")
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def _none() -> int:
    return 0


def _fit() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How a service shows that it moves.

    pending: number of pieces of work it holds now; 0 when idle.
    steps: a counter that rises while it works, such as engine steps. Read from another thread: must not block.
    stall_s: seconds without a step, with work pending, after which the service counts as wedged. Above its longest
        honest step.
    unfit: why it cannot serve although it moves; empty while it can.
    """

    pending: Callable[[], int] = _none
    steps: Callable[[], int] = _none
    stall_s: float = 10.0
    unfit: Callable[[], str] = _fit


class StallDetector:
    """Decides from successive observations whether the work is stuck."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._steps = -1
        self._moved_at = 0.0

    def stalled(self, now: float, pending: int, steps: int) -> bool:
        """True when work has been pending for `stall_s` seconds of `now` while `steps` stood still."""
        if not pending or steps != self._steps:
            self._steps, self._moved_at = steps, now
        return now - self._moved_at >= self._stall_s


class HealthMonitor:
    """Sets the status of the standard health service: SERVING when ready and not stuck."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic, period_s: float = 0.5) -> None:
        self.servicer = health_aio.HealthServicer()
        self._names: Sequence[str] = ("",)
        self._progress = progress
        self._detector = StallDetector(progress.stall_s)
        self._clock = clock
        self._period_s = period_s
        self._ready = False
        self._stalled = False
        self._unfit = ""

    @property
    def serving(self) -> bool:
        return self._ready and not self._stalled and not self._unfit

    async def start(self, names: Sequence[str]) -> None:
        """Declares the services that share this status, NOT_SERVING until `set_ready`."""
        self._names = ("", *names)
        await self._publish()

    async def set_ready(self, ready: bool) -> None:
        self._ready = ready
        await self._publish()

    async def watch(self) -> None:
        """Observes progress until cancelled."""
        while True:
            await self.observe()
            await asyncio.sleep(self._period_s)

    async def observe(self) -> None:
        """Takes one look at the counters and publishes a change."""
        progress = self._progress
        stalled = self._detector.stalled(self._clock(), progress.pending(), progress.steps())
        unfit = progress.unfit()
        if (stalled, unfit) == (self._stalled, self._unfit):
            return
        if stalled != self._stalled:
            _log.warning("stalled" if stalled else "moving again", pending=progress.pending(), steps=progress.steps())
        if unfit != self._unfit:
            _log.warning("unfit" if unfit else "fit again", reason=unfit or self._unfit)
        self._stalled, self._unfit = stalled, unfit
        await self._publish()

    async def _publish(self) -> None:
        for name in self._names:
            await self.servicer.set(name, _SERVING if self.serving else _NOT_SERVING)
