"""One connection to one instance of a service, closed when it left and nobody uses it. Knows channels, no service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fabric.channels import Channels
from fabric.discovery import MemberInfo

StubT = TypeVar("StubT")


class Link:
    """Counts its users: an instance that drains leaves discovery first and ends its streams afterwards."""

    def __init__(self, member: MemberInfo) -> None:
        self.member = member
        self._channels = Channels()
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def key(self) -> str:
        """Names this incarnation."""
        return f"{self.member.instance}@{self.member.epoch}"

    def stub(self, make: Callable[[Any], StubT]) -> StubT:
        return self._channels.stub(make, self.member.address)

    def use(self) -> None:
        """One more request relies on the connection."""
        self._users += 1
        self._idle.clear()

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            self._idle.set()

    async def retire(self, patience_s: float) -> None:
        """Closes once unused, or after `patience_s` seconds."""
        try:
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            pass  # a stream this old has outlived the longest deadline there is
        await self._channels.close()

    async def close(self) -> None:
        await self._channels.close()
