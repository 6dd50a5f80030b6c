"""An ASGI application served inside a service's own event loop. Knows uvicorn, not the application."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from fabric import lifecycle
from fabric.errors import StartError

_TICK_S = 1.0
_FORCED_S = 2.0  # for a server that was told to drop everything, and again for its application


class _Server(uvicorn.Server):
    """Tells when it listens and is told when to leave: uvicorn itself looks ten times a second. Signals belong to the
    chassis."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening, self._leaving = asyncio.Event(), asyncio.Event()

    def leave(self) -> None:
        """Takes no new connection; ends when the last response has."""
        self.should_exit = True
        self._leaving.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as error:  # what uvicorn makes of an application that fails its lifespan
            raise StartError("the HTTP application did not start", field="http", fix="its log says why") from error
        self.listening.set()

    async def main_loop(self) -> None:
        """Keeps the headers' date."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._leaving.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpFront:
    """Serves `app` from `start` to `stop`; `address` holds the port taken."""

    def __init__(self, app: Any, listen: str) -> None:
        self._listen = listen
        self.address = listen
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", timeout_keep_alive=75)
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it listens. Raises StartError where the port is taken or the application does not start."""
        host, port = lifecycle.split_address(self._listen, "http")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # The protocol is named so that asyncio turns Nagle off: head and first event are two writes, 40 ms apart.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise lifecycle.port_error(self._listen, "http") from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait([self._task, listening], return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            listener.close()
            self._task.result()

    async def stop(self, grace_s: float) -> None:
        """Takes no new connection, lets running responses end within `grace_s` seconds, then cuts them."""
        if self._task is None:
            return
        self._server.leave()
        done, _ = await asyncio.wait([self._task], timeout=grace_s)
        if not done:
            self._server.force_exit = True
            await asyncio.wait([self._task], timeout=_FORCED_S)
            # uvicorn leaves this out where it is forced: the application would never hear of its end.
            with suppress(TimeoutError):
                async with asyncio.timeout(_FORCED_S):
                    await self._server.lifespan.shutdown()
        self._task = None
