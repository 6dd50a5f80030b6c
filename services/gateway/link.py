"""One connection to one instance of a service, closed when it left and nobody uses it. Knows channels, no service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from fabric.channels import CHANNEL_OPTIONS
from fabric.discovery import MemberInfo

StubT = TypeVar("StubT")

# The flow repeats on another worker; a channel that repeats by itself would take a second ticket from the same one.
_OPTIONS = [
    *(option for option in CHANNEL_OPTIONS if option[0] not in ("grpc.enable_retries", "grpc.service_config")),
    ("grpc.enable_retries", 0),
]


class Link:
    """Counts its users: an instance that drains leaves discovery first and ends its streams afterwards."""

    def __init__(self, member: MemberInfo) -> None:
        self.member = member
        self._channel: grpc.aio.Channel | None = None
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def key(self) -> str:
        """Names this incarnation."""
        return f"{self.member.instance}@{self.member.epoch}"

    def stub(self, make: Callable[[Any], StubT]) -> StubT:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.member.address, options=_OPTIONS)
        return make(self._channel)

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
        await self.close()

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
