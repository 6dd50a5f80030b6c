"""What every discovery backend does. Knows no backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from fabric.discovery.member import MemberInfo

Snapshot = tuple[MemberInfo, ...]


class Discovery(Protocol):
    """Where instances announce themselves and find each other. Whatever runs, runs inside its two iterators."""

    async def ready(self, timeout_s: float) -> None:
        """Waits until the backend answers; at once where it has no server of its own.

        Raises Unavailable after `timeout_s` seconds.
        """
        return

    def register(self, member: MemberInfo) -> AbstractAsyncContextManager[None]:
        """Announces `member` while the context is open, through losses of the backend; withdraws it at exit."""
        ...

    def members(self, service: str) -> AsyncIterator[Snapshot]:
        """All instances of a service, sorted by name: now, then after every change, without end.

        Losing the backend yields nothing: the last snapshot stays valid until the backend answers otherwise.
        """
        ...
