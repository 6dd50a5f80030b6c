"""Doubts: landings whose writers fell silent, until these say more or are proven dead. Knows ids, no memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fabric.deaths import Deaths, Incarnation, Vigil
from fabric.discovery import Discovery
from fabric.telemetry import logs

_log = logs.get("doubts")
# What a writer that is over has under way lies in socket buffers here, or where its host's kernel still sends it.
LINGER_S = 2.0
# Of a longer pause between two looks only this much counts: we may have stood still.
LONGEST_STEP_S = 1.0


class Doubts:
    """`settled`: whether a landing's writer said that it is done meanwhile. `free`: gives one of a dead writer back."""

    def __init__(
        self,
        deaths: Deaths,
        clock: Callable[[], float],
        settled: Callable[[str], bool],
        free: Callable[[str], None],
        linger_s: float = LINGER_S,
    ) -> None:
        self._deaths, self._clock, self._settled, self._free = deaths, clock, settled, free
        self._vigil = Vigil(linger_s, LONGEST_STEP_S)
        self._writers: dict[str, Incarnation] = {}

    def __len__(self) -> int:
        return len(self._writers)

    def add(self, landing_id: str, writer: Incarnation) -> None:
        """`writer` may still write into this landing."""
        self._writers[landing_id] = writer

    def sweep(self) -> None:
        """Frees what the dead can no longer reach. To be called often."""
        for landing_id in [one for one in self._writers if self._settled(one)]:
            del self._writers[landing_id]
        dead = [landing_id for landing_id, writer in self._writers.items() if self._deaths.proven(writer)]
        for landing_id in self._vigil.step(self._clock(), dead):
            del self._writers[landing_id]
            _log.info("landing freed: its writer is over", landing=landing_id)
            self._free(landing_id)

    async def sweep_every(self, period_s: float) -> None:
        """Sweeps until cancelled."""
        while True:
            self.sweep()
            await asyncio.sleep(period_s)

    async def follow(self, discovery: Discovery, service: str) -> None:
        """Learns of successors until cancelled."""
        async for members in discovery.members(service):
            self._deaths.listed(members)
