"""Wake: tickets whose writers died, until nothing of theirs can still arrive. Knows deaths and a clock, no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fabric.deaths import Deaths, Vigil
from fabric.discovery import Discovery
from services.decode.tickets import Ticket

# What a dead writer has under way lies in socket buffers of this host, or is on a wire whose sender's kernel lives.
LINGER_S = 2.0
# Of a longer pause between two looks only this much counts: we may have stood still.
LONGEST_STEP_S = 1.0


class Wake:
    """Decides which doubts are over."""

    def __init__(self, deaths: Deaths, clock: Callable[[], float], linger_s: float = LINGER_S) -> None:
        self._deaths, self._clock = deaths, clock
        self._vigil = Vigil(linger_s, LONGEST_STEP_S)

    def over(self, doubted: Iterable[Ticket]) -> list[str]:
        """Ids of those whose writers have been dead for long enough. To be called regularly."""
        dead = [t.id for t in doubted if t.writer is not None and self._deaths.proven(t.writer)]
        return self._vigil.step(self._clock(), dead)

    async def follow(self, discovery: Discovery, service: str) -> None:
        """Learns of successors until cancelled."""
        async for members in discovery.members(service):
            self._deaths.listed(members)
