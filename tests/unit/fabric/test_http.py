"""The HTTP side of a service: it serves beside gRPC and lets running responses end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fabric.errors import StartError
from fabric.http import HttpFront
from fabric.server import Chassis, Service
from tests.support.echo import EchoSettings


async def slow_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers "begin", waits 0.5 s, answers "end"."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begin ", "more_body": True})
    await asyncio.sleep(0.5)
    await send({"type": "http.response.body", "body": b"end"})


async def get(address: str, begun: asyncio.Event) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    text = await reader.readuntil(b"begin ")
    begun.set()
    text += await reader.read()
    writer.close()
    return text


async def test_a_drain_lets_a_running_response_end_and_takes_no_new_one():
    @asynccontextmanager
    async def build(_: EchoSettings) -> AsyncIterator[Service]:
        yield Service([], http=slow_app)

    chassis = Chassis(EchoSettings(discovery="memory://test-http", drain_s=5.0), build)
    ready = await chassis.start()
    begun = asyncio.Event()
    response = asyncio.create_task(get(ready.http, begun))
    try:
        async with asyncio.timeout(10.0):
            await begun.wait()
            await chassis.drain()
            assert b"end" in await response
            with pytest.raises(OSError):
                await get(ready.http, begun)
    finally:
        await chassis.close()


async def test_a_busy_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(StartError, match=address) as caught:
            await HttpFront(slow_app, address).start()
    assert caught.value.field == "http"


async def test_an_application_that_fails_to_start_is_a_start_error():
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})

    with pytest.raises(StartError, match="did not start"):
        async with asyncio.timeout(5.0):
            await HttpFront(broken, "127.0.0.1:0").start()


@pytest.mark.parametrize("listen", ["8000", "host:", ":80", "h:99999", "h:port"])
async def test_a_malformed_address_is_named(listen):
    with pytest.raises(StartError, match="host:port"):
        await HttpFront(slow_app, listen).start()
