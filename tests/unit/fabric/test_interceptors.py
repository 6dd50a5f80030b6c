"""A handler that writes by itself always gets its error across."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from fabric import errors
from fabric.errors import InvalidArgument
from fabric.interceptors import CallScope, InFlight
from fabric.telemetry.metrics import Metrics


async def gives_up_while_it_writes(requests: AsyncIterator[bytes], context: Any) -> None:
    """As a service that tells its progress in a task of its own and then finds the request wrong."""
    await anext(requests)
    writing = asyncio.create_task(context.write(b"progress"))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    raise InvalidArgument("wrong", field="tokens", fix="send others")


async def test_an_error_after_a_write_that_was_cancelled_reaches_the_caller_at_once() -> None:
    server = grpc.aio.server(interceptors=[CallScope(Metrics("test"), InFlight())])
    method = grpc.stream_stream_rpc_method_handler(gives_up_while_it_writes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Tell": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream("/test.Service/Tell")(timeout=5.0)
            await call.write(b"ask")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
    finally:
        await server.stop(0)
    told = errors.from_rpc(caught.value)
    assert isinstance(told, InvalidArgument) and told.field == "tokens"
