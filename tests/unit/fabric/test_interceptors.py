"""A handler that writes by itself always gets its error across."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from fabric import errors
from fabric.errors import InvalidArgument
from fabric.interceptors import CallScope, InFlight, request_id
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


class Arrived:
    """What a call's context says when it arrives."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-request-id", "mine"),)

    def time_remaining(self) -> None:
        return None


@pytest.mark.parametrize(("failure", "code"), [(None, "ok"), (asyncio.CancelledError(), "cancelled")])
async def test_a_call_is_recorded_once_behind_its_answer_under_its_own_id(
    failure: BaseException | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, ids = Metrics("test"), list[str]()
    scope = CallScope(metrics, InFlight())
    record = scope._record
    monkeypatch.setattr(scope, "_record", lambda *call: (ids.append(request_id()), record(*call)))

    def counted() -> float | None:
        return metrics.registry.get_sample_value("deepinfer_rpc_requests_total", {"method": "/test/Do", "code": code})

    with suppress(asyncio.CancelledError):
        async with scope._scope("/test/Do", Arrived()):
            if failure is not None:
                raise failure
    assert counted() is None, "the answer goes first"
    await asyncio.sleep(0)
    assert (counted(), ids) == (1.0, ["mine"])
