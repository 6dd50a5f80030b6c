"""Discovery from a fixed list in the URL. Knows addresses alone: models and capacities are asked from the services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fabric.discovery.base import Discovery, Snapshot
from fabric.discovery.member import MemberInfo
from fabric.errors import StartError


class StaticDiscovery(Discovery):
    """`static://decode=host:port,decode=host:port,recipe=host:port`."""

    def __init__(self, members: Snapshot) -> None:
        self._members = members

    @staticmethod
    def parse(text: str) -> StaticDiscovery:
        """Raises StartError where an item is not service=host:port."""
        return StaticDiscovery(tuple(_parse_item(item) for item in text.split(",") if item))

    @asynccontextmanager
    async def register(self, member: MemberInfo) -> AsyncIterator[None]:
        """The list is fixed: an instance serves without being announced."""
        yield

    async def members(self, service: str) -> AsyncIterator[Snapshot]:
        yield tuple(sorted((m for m in self._members if m.service == service), key=lambda m: m.instance))
        await asyncio.Event().wait()


def _parse_item(item: str) -> MemberInfo:
    service, _, address = item.partition("=")
    host, _, port = address.rpartition(":")
    if not service or not host or not port.isdecimal():
        raise StartError(f"{item!r} is not service=host:port", field="discovery", fix="such as decode=127.0.0.1:7003")
    return MemberInfo(service=service, instance=f"{service}-{address}", address=address, epoch=0)
