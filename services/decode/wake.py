"""Wake: tickets whose writers are over, until nothing of theirs can still arrive. Knows deaths, a clock, no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fabric.deaths import Deaths, Vigil
from fabric.discovery import Discovery
from services.decode.tickets import Ticket
from services.worker.doubts import LINGER_S, LONGEST_STEP_S


class Wake:
    """Decides which doubts are over."""

    def __init__(self, deaths: Deaths, clock: Callable[[], float], linger_s: float = LINGER_S) -> None:
        self._deaths, self._clock = deaths, clock
        self._vigil = Vigil(linger_s, LONGEST_STEP_S)

    def over(self, doubted: Iterable[Ticket]) -> list[str]:
        """Ids of those whose writers have been over for long enough, dead or by their own word. To be called often."""
        return self._vigil.step(self._clock(), [ticket.id for ticket in doubted if self._is_over(ticket)])

    def _is_over(self, ticket: Ticket) -> bool:
        return ticket.trailing or (ticket.writer is not None and self._deaths.proven(ticket.writer))

    async def follow(self, discovery: Discovery, service: str) -> None:
        """Learns of successors until cancelled."""
        async for members in discovery.members(service):
            self._deaths.listed(members)
