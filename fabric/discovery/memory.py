"""Discovery inside one process, for tests and single-process stacks. Knows one registry per name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fabric.discovery.base import Discovery, Snapshot
from fabric.discovery.member import MemberInfo


class _Registry:
    """Members of all services and the watchers to wake when one changes."""

    def __init__(self) -> None:
        self.members: dict[tuple[str, str], MemberInfo] = {}
        self.watchers: set[asyncio.Event] = set()

    def set(self, member: MemberInfo) -> None:
        self.members[member.service, member.instance] = member
        self._wake()

    def remove(self, member: MemberInfo) -> None:
        key = (member.service, member.instance)
        if self.members.get(key) == member:
            del self.members[key]
            self._wake()

    def snapshot(self, service: str) -> Snapshot:
        return tuple(self.members[key] for key in sorted(self.members) if key[0] == service)

    def _wake(self) -> None:
        for watcher in self.watchers:
            watcher.set()


_registries: dict[str, _Registry] = {}


class MemoryDiscovery(Discovery):
    """`memory://name`: every opener of the same name in this process shares the members."""

    def __init__(self, name: str) -> None:
        self._registry = _registries.setdefault(name, _Registry())

    @asynccontextmanager
    async def register(self, member: MemberInfo) -> AsyncIterator[None]:
        self._registry.set(member)
        try:
            yield
        finally:
            self._registry.remove(member)

    async def members(self, service: str) -> AsyncIterator[Snapshot]:
        changed = asyncio.Event()
        self._registry.watchers.add(changed)
        try:
            shown: Snapshot | None = None
            while True:
                changed.clear()
                snapshot = self._registry.snapshot(service)
                if snapshot != shown:
                    shown = snapshot
                    yield snapshot
                    continue
                await changed.wait()
        finally:
            self._registry.watchers.discard(changed)
