"""The chassis in one process: errors, deadlines, ids, bursts, start and drain."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fabric import deadline, errors
from fabric.channels import Channels, call, stream
from fabric.discovery import open_discovery
from fabric.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    Internal,
    ServiceError,
    StartError,
    Unavailable,
)
from fabric.server import Chassis, Service
from tests.support import echo
from tests.support.echo import EchoServicer, EchoSettings, EchoStub


class Running:
    """A started chassis with a client."""

    def __init__(self, chassis: Chassis[EchoSettings], ready: Any, servicer: EchoServicer, channels: Channels) -> None:
        self.chassis, self.ready, self.servicer, self.channels = chassis, ready, servicer, channels
        self.stub = channels.stub(EchoStub, ready.address)

    async def unary(self, text: str, timeout_s: float | None = 10.0) -> str:
        return (await call(self.stub.Unary, text.encode(), timeout_s=timeout_s)).decode()

    def stream(self, text: str, timeout_s: float | None = 10.0) -> AsyncIterator[bytes]:
        return stream(self.stub.Stream, text.encode(), timeout_s=timeout_s)

    async def health(self) -> int:
        stub = self.channels.stub(health_pb2_grpc.HealthStub, self.ready.address)
        reply = await call(stub.Check, health_pb2.HealthCheckRequest(service=echo.NAME), timeout_s=5.0)
        return int(reply.status)


def settings(**changes: Any) -> EchoSettings:
    return EchoSettings(**({"discovery": "memory://test-server", "drain_s": 5.0} | changes))


@asynccontextmanager
async def started(on_drain: Callable[[], Awaitable[None]] | None = None, **changes: Any) -> AsyncIterator[Running]:
    servicer = EchoServicer()

    @asynccontextmanager
    async def build(options: EchoSettings) -> AsyncIterator[Service]:
        async with echo.build(options) as service:
            yield Service([(echo.add, servicer)], service.progress, service.members, on_drain=on_drain)

    chassis = Chassis(settings(**changes), build)
    async with Channels() as channels:
        try:
            yield Running(chassis, await chassis.start(), servicer, channels)
        finally:
            await chassis.close()


@pytest.fixture
async def running():
    async with started() as found:
        yield found


@pytest.mark.parametrize("kind", errors.STATUS, ids=lambda kind: kind.__name__)
async def test_the_caller_receives_the_error_that_the_handler_raised(running, kind):
    with pytest.raises(kind) as caught:
        await running.unary(f"fail {kind.__name__}")
    assert type(caught.value) is kind
    assert (caught.value.field, caught.value.fix, caught.value.retry_after_s) == ("request", "ask otherwise", 0.25)


async def test_a_defect_is_internal_and_says_nothing_of_its_cause(running):
    with pytest.raises(Internal) as caught:
        await running.unary("bug the-users-secret-text")
    assert "secret" not in str(caught.value)
    assert re.search(r"request id [0-9a-f]{32}", str(caught.value))


async def test_logs_never_hold_what_was_asked(running, capfd):
    canary = "canary-8f2a"
    await running.unary(canary)
    with pytest.raises(ServiceError):
        await running.unary(f"bug {canary}")
    captured = capfd.readouterr()
    assert canary not in captured.out + captured.err


async def test_a_missing_deadline_gets_the_default_and_an_absurd_one_the_cap(running):
    assert 115 < float(await running.stub.Unary(b"remaining")) <= 120
    assert 3500 < float(await running.stub.Unary(b"remaining", timeout=1e7)) <= 3600


async def test_a_call_from_a_call_gets_a_shorter_deadline(running):
    deadline.enter(60.0)
    assert 40.0 < float(await running.unary("remaining", timeout_s=None)) < 60.0


async def test_the_default_deadline_is_enforced_where_the_caller_set_none(running, monkeypatch):
    monkeypatch.setattr(deadline, "CAP_S", 0.2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.Unary(b"sleep 30")
    assert type(errors.from_rpc(caught.value)) is DeadlineExceeded
    assert running.servicer.active == 0


async def test_a_deadline_ends_the_handler(running):
    with pytest.raises(DeadlineExceeded):
        await running.unary("sleep 30", timeout_s=0.2)
    await _until(lambda: running.servicer.active == 0)


async def test_leaving_a_stream_early_ends_its_handler_long_before_its_end(running):
    async with aclosing(running.stream("100000,0.01")) as replies:
        await anext(replies)
        assert running.servicer.active == 1
    await _until(lambda: running.servicer.active == 0)


async def test_a_stream_arrives_whole_and_in_order(running):
    assert [int(reply) async for reply in running.stream("500")] == list(range(500))


async def test_a_burst_of_4000_calls_is_served_without_one_reset(running):
    replies = await asyncio.gather(
        *(running.unary("sleep 0.01", timeout_s=60.0) for _ in range(4000)), return_exceptions=True
    )
    assert [reply for reply in replies if reply != "sleep 0.01"] == []


async def test_request_ids_travel_and_insane_ones_are_replaced(running):
    async def answered_id(given: str) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Unary(b"bug", metadata=(("x-request-id", given),))
        return str(caught.value.details()).rsplit(" ", 1)[1]

    assert await answered_id("abc-1") == "abc-1"
    assert await answered_id("x" * 1000) != "x" * 1000


async def test_reflection_lists_the_service_and_can_be_turned_off(running):
    assert echo.NAME in await _reflected(running)
    async with started(reflection=False) as closed:
        with pytest.raises(ServiceError):
            await _reflected(closed)


async def test_a_wedged_service_turns_not_serving():
    async with started(wedged=True) as wedged:
        assert await wedged.health() == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(20.0):
            while await wedged.health() != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_calls_are_counted_by_method_and_code(running):
    await running.unary("hello")
    with pytest.raises(Exhausted):
        await running.unary("fail Exhausted")
    text = await _metrics(running.ready.metrics)
    assert f'deepinfer_rpc_requests_total{{code="ok",method="/{echo.NAME}/Unary"}} 1.0' in text
    assert f'deepinfer_rpc_requests_total{{code="exhausted",method="/{echo.NAME}/Unary"}} 1.0' in text
    assert 'deepinfer_build_info{name="service",value="echo"} 1.0' in text


async def test_it_registers_where_it_listens_and_leaves_first_when_drained(running):
    found = open_discovery("memory://test-server")
    async with aclosing(found.members("echo")) as snapshots:
        (member,) = await anext(snapshots)
        assert member.address == running.ready.address
        work = asyncio.create_task(running.unary("sleep 1.5"))
        watching = asyncio.create_task(anext(running.channels.stub(EchoStub, member.address).Watch(b"").__aiter__()))
        await _until(lambda: running.servicer.active == 1)
        draining = asyncio.create_task(running.chassis.drain())
        assert await anext(snapshots) == ()
        assert await running.health() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await work == "sleep 1.5"
        async with asyncio.timeout(20.0):
            await draining
        await asyncio.wait([watching])
    with pytest.raises(Unavailable):
        await running.unary("hello", timeout_s=2.0)


async def test_a_service_hears_of_its_drain_while_callers_still_find_it():
    found = open_discovery("memory://test-server")
    heard: list[tuple[int, int]] = []

    async def hear() -> None:
        async with aclosing(found.members("echo")) as snapshots:
            heard.append((await running.health(), len(await anext(snapshots))))

    async with started(on_drain=hear) as running:
        await running.chassis.drain()
    assert heard == [(health_pb2.HealthCheckResponse.SERVING, 1)]


async def test_a_drain_gives_up_after_its_grace():
    async with started(drain_s=0.3) as running:
        work = asyncio.create_task(running.unary("sleep 30"))
        await _until(lambda: running.servicer.active == 1)
        async with asyncio.timeout(20.0):
            await running.chassis.drain()
        with pytest.raises((Unavailable, Cancelled)):
            await work


@pytest.mark.parametrize("field", ["listen", "metrics"])
async def test_a_busy_port_is_an_error_that_names_it_and_leaves_nothing(field):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        chassis = Chassis(settings(**{field: address}), echo.build)
        with pytest.raises(StartError, match=address) as caught:
            await chassis.start()
        assert caught.value.field == field
        assert caught.value.fix
    await _nothing_left(chassis)


@pytest.mark.promise(25)
@pytest.mark.parametrize("step", ["discovery", "build", "server", "http", "metrics", "register"])
async def test_a_failure_at_any_start_step_leaves_nothing(step, monkeypatch, promise):
    built: list[str] = []

    @asynccontextmanager
    async def build(options: EchoSettings) -> AsyncIterator[Service]:
        if step == "build":
            raise StartError("no")
        built.append("in")
        async with echo.build(options) as service:
            yield Service(service.servicers, service.progress, service.members, _app if step == "http" else None)
        built.append("out")

    chassis = Chassis(settings(), build)
    _break(step, monkeypatch)
    with pytest.raises(StartError):
        await chassis.start()
    assert built in ([], ["in", "out"])
    before = built.copy()
    await _nothing_left(chassis)
    promise(25, f"start fails at {step}: steps that a second cleanup undoes", len(built) - len(before), exactly=0)


async def test_two_servers_never_share_a_port_even_when_both_look_at_once(running, monkeypatch):
    monkeypatch.setattr("fabric.lifecycle.check_port_free", lambda *_: None)
    second = Chassis(settings(listen=running.ready.address), echo.build)
    with pytest.raises(StartError, match=running.ready.address):
        await second.start()
    assert await running.unary("still here") == "still here"


async def test_a_cancelled_start_leaves_nothing():
    chassis = Chassis(settings(discovery="etcd://127.0.0.1:1"), echo.build)
    start = asyncio.create_task(chassis.start())
    await asyncio.sleep(0.05)
    start.cancel()
    await asyncio.wait([start])
    assert start.cancelled()
    await _nothing_left(chassis)


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application that is never reached."""


def _break(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StartError("no")

    target = {
        "discovery": "fabric.server.open_discovery",
        "server": "fabric.server.reflection.enable_server_reflection",
        "http": "fabric.http.HttpFront.start",
        "metrics": "fabric.server.MetricsServer",
        "register": "fabric.discovery.memory.MemoryDiscovery.register",
    }.get(step)
    if target:
        monkeypatch.setattr(target, fail)


async def _nothing_left(chassis: Chassis[EchoSettings]) -> None:
    """A second cleanup is a no-op, no task runs, no member is announced."""
    await chassis.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert {
        task.get_name() for task in others if task.get_name() in ("health", "http") or "register" in task.get_name()
    } == set()
    async with aclosing(open_discovery("memory://test-server").members("echo")) as snapshots:
        assert await anext(snapshots) == ()


async def _until(done: Any, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not done():  # noqa: ASYNC110  # a counter of the code under test
            await asyncio.sleep(0.005)


async def _reflected(running: Running) -> list[str]:
    stub = running.channels.stub(reflection_pb2_grpc.ServerReflectionStub, running.ready.address)

    async def ask() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async with aclosing(stream(stub.ServerReflectionInfo, ask(), timeout_s=5.0)) as replies:
        reply = await anext(replies)
    return [service.name for service in reply.list_services_response.service]


async def _metrics(address: str) -> str:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return text
