"""Calls end by their deadline whatever the network does, retry only what is safe, and know one message limit."""

from __future__ import annotations

import time
from contextlib import aclosing, asynccontextmanager

import pytest

from fabric.channels import MAX_MESSAGE_BYTES, Channels, call, stream
from fabric.errors import DeadlineExceeded, Exhausted, Unavailable
from fabric.server import Chassis
from tests.support.echo import EchoSettings, EchoStub, build
from tests.support.faultproxy import Faults, fault_proxy
from tests.support.servers import free_ports

SLACK_S = 5.0  # what a busy machine may add


@pytest.fixture
async def address():
    chassis = Chassis(EchoSettings(discovery="memory://test-channels", drain_s=1.0), build)
    yield (await chassis.start()).address
    await chassis.close()


@asynccontextmanager
async def through_proxy(address: str):
    async with fault_proxy(address, seed=5) as proxy, Channels() as channels:
        yield proxy, channels.stub(EchoStub, proxy.address)


@pytest.mark.parametrize(
    "faults",
    [Faults(black_hole=True), Faults(half_open=True), Faults(drip_bytes_per_s=20), Faults(delay_s=5.0)],
    ids=["black-hole", "half-open", "drip", "delay"],
)
async def test_every_call_ends_by_its_deadline_on_a_sick_network(address, faults):
    async with through_proxy(address) as (proxy, stub):
        assert await call(stub.Unary, b"well", timeout_s=5.0) == b"well"
        proxy.faults = faults
        started = time.monotonic()
        with pytest.raises((DeadlineExceeded, Unavailable)):
            await call(stub.Unary, b"sick", timeout_s=0.5)
        with pytest.raises((DeadlineExceeded, Unavailable)):
            async with aclosing(stream(stub.Stream, b"1000,0.01", timeout_s=0.5)) as replies:
                async for _ in replies:
                    pass
        assert time.monotonic() - started < 2 * (0.5 + SLACK_S)


async def test_a_peer_that_is_slow_to_accept_is_reached(address):
    async with through_proxy(address) as (proxy, stub):
        proxy.faults = Faults(delay_s=0.3)
        assert await call(stub.Unary, b"busy", timeout_s=20.0) == b"busy"


async def test_a_hole_in_mid_stream_is_noticed_before_a_long_deadline(address):
    async with through_proxy(address) as (proxy, stub):
        replies = stream(stub.Stream, b"100000,0.01", timeout_s=60.0)
        await anext(replies)
        proxy.faults = Faults(black_hole=True)
        started = time.monotonic()
        with pytest.raises(Unavailable):
            async for _ in replies:
                pass
        assert time.monotonic() - started < 20.0


async def test_a_cut_connection_is_retried_before_the_first_reply_only(address):
    async with through_proxy(address) as (proxy, stub):
        await call(stub.Unary, b"a", timeout_s=5.0)
        proxy.cut()
        assert await call(stub.Unary, b"b", timeout_s=5.0) == b"b"
        async with aclosing(stream(stub.Stream, b"100000,0.01", timeout_s=10.0)) as replies:
            seen = [await anext(replies)]
            proxy.cut()
            with pytest.raises(Unavailable):
                async for reply in replies:
                    seen.append(reply)
        assert [int(reply) for reply in seen] == list(range(len(seen)))


async def test_an_absent_server_is_unavailable_long_before_the_deadline():
    (port,) = free_ports(1)
    async with Channels() as channels:
        started = time.monotonic()
        with pytest.raises(Unavailable):
            await call(channels.stub(EchoStub, f"127.0.0.1:{port}").Unary, b"", timeout_s=30.0)
        assert time.monotonic() - started < 15.0


async def test_messages_up_to_the_limit_pass_and_larger_ones_are_refused(address):
    async with Channels() as channels:
        stub = channels.stub(EchoStub, address)
        large = b"x" * (MAX_MESSAGE_BYTES - 1024)
        assert len(await call(stub.Unary, large, timeout_s=20.0)) == len(large)
        with pytest.raises(Exhausted):
            await call(stub.Unary, b"x" * (MAX_MESSAGE_BYTES + 1), timeout_s=20.0)


async def test_a_dropped_channel_ends_its_calls_and_the_next_one_connects_anew(address):
    async with Channels() as channels:
        replies = stream(channels.stub(EchoStub, address).Stream, b"100000,0.01", timeout_s=10.0)
        await anext(replies)
        await channels.drop(address)
        with pytest.raises(Unavailable):
            while True:
                await anext(replies)
        assert await call(channels.stub(EchoStub, address).Unary, b"c", timeout_s=5.0) == b"c"
