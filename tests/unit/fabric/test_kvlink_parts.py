"""Small parts of the KV link: incarnations, notices, lanes, and a hostile writer on the TCP port."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import numpy as np
import pytest

from fabric.errors import InvalidArgument, StaleTicket
from fabric.kvlink import tcp_frames as frames
from fabric.kvlink import ucx_lanes
from fabric.kvlink.inbox import CAPACITY, Inbox
from fabric.kvlink.link import Notice, Token
from fabric.kvlink.peers import PeerBook
from fabric.kvlink.tcp import TcpLink
from fabric.kvlink.tcp_frames import Greeting
from fabric.records import LinkAddress

LOG = """
UCX  INFO    src:1 self cfg#0 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)
UCX  INFO    src:1 intra-node cfg#1 rma(sysv/memory)  am(tcp/eth0 cma/memory)  ka(tcp/eth0)
UCX  INFO    src:1 inter-node cfg#2 rma(rc_mlx5/mlx5_0:1)
"""


def address(epoch: int) -> LinkAddress:
    return LinkAddress("tcp://h:1", "decode-1", epoch)


def test_an_overtaken_incarnation_is_refused_for_ever():
    book = PeerBook()
    assert book.admit(address(1)) is None
    assert book.admit(address(1)) is None
    assert book.admit(address(3)) == address(1)
    with pytest.raises(StaleTicket):
        book.admit(address(2))
    assert book.admit(address(3)) is None


@pytest.mark.parametrize(
    ("log", "lanes"),
    [
        (LOG, "cma/memory+rc_mlx5/mlx5_0:1+sysv/memory+tcp/eth0"),
        (LOG.splitlines()[1], "unconnected"),
        ("", "unconnected"),
    ],
)
def test_lanes_are_those_towards_peers(log, lanes):
    assert ucx_lanes.parse(log) == lanes


def test_a_users_own_ucx_log_file_is_left_alone(monkeypatch):
    monkeypatch.setattr(ucx_lanes, "_log_fd", -1)
    monkeypatch.setenv("UCX_LOG_FILE", "/var/log/ucx.log")
    ucx_lanes.prepare()
    assert ucx_lanes._log_fd == -1
    assert "UCX_LOG_FILE" in ucx_lanes.chosen()


async def test_a_full_inbox_makes_the_transport_wait_and_drops_nothing():
    inbox = Inbox()
    notices = [Notice("p", 1, str(index).encode()) for index in range(CAPACITY + 1)]
    inbox.put_now(notices[:CAPACITY])
    assert inbox.room == 0
    waiting = asyncio.create_task(inbox.put(notices[CAPACITY]))
    await asyncio.sleep(0)
    assert not waiting.done()
    seen = []
    async for notice in inbox:
        seen.append(notice)
        if len(seen) == CAPACITY:
            await waiting
            inbox.close()
    assert seen == notices


@pytest.fixture
async def link():
    opened = TcpLink("127.0.0.1", 0, "decode-1", 5)
    yield opened
    await opened.close()


async def hostile(link: TcpLink, *packets: bytes) -> bytes:
    """Everything the link answers to these bytes until it hangs up; a reset, as it leaves the rest unread, is fine."""
    host, _, port = link.address.url.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for packet in packets:
        writer.write(packet)
    answer = b""
    with suppress(ConnectionResetError):
        async with asyncio.timeout(5.0):
            while part := await reader.read(100):
                answer += part
    writer.close()
    return answer


def push(number: int, offset: int, size: int, payload: bytes) -> bytes:
    return frames.pack_push(np.array([[number, offset, size]], np.int64), b"done") + payload


GREETING = Greeting(1, 5, "prefill-1", "decode-1").pack()
DONE, STALE, REFUSED = (frames.pack_answer(answer) for answer in frames.Answer)


@pytest.mark.parametrize(
    "packet",
    [push(0, 100, 1, b"x"), push(0, -1, 1, b"x"), push(0, 99, 2, b"xx"), push(7, 0, 1, b"x"), b"\0" * 64],
    ids=["behind", "before", "across", "no-region", "garbage"],
)
async def test_a_hostile_push_is_refused_before_it_touches_memory(link, packet):
    memory = np.zeros(100, np.uint8)
    link.register(memory)
    answer = await hostile(link, GREETING, packet)
    assert answer in (DONE + REFUSED, DONE, b"")
    assert not memory.any()
    await serves_others(link, memory)


async def serves_others(link: TcpLink, memory: np.ndarray) -> None:
    host, _, port = link.address.url.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(GREETING + push(0, 99, 1, b"\x07"))
    async with asyncio.timeout(5.0):
        assert await reader.readexactly(2 * frames.ANSWER_BYTES) == DONE + DONE
    assert memory[99] == 7
    writer.close()


async def test_a_connection_that_cannot_be_accepted_does_not_end_the_listening(link, monkeypatch):
    accept, failures = socket.socket.accept, [OSError(24, "no descriptor is free")]

    def failing(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    memory = np.zeros(100, np.uint8)
    link.register(memory)
    await serves_others(link, memory)
    assert not failures


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:99999", "tcp://127.0.0.1:x", "ucx://", ""])
async def test_an_address_that_is_none_is_refused(link, url):
    with pytest.raises(InvalidArgument):
        await link.push(LinkAddress(url, "prefill-1", 1), [], notify=b"x", timeout_s=1.0)


@pytest.mark.parametrize("token", [Token(0, 2**64 - 1, 4096), Token(0, 2**63 - 1, 1), Token(2**63, 0, 1)])
def test_a_token_of_memory_that_cannot_be_is_refused(token):
    with pytest.raises(InvalidArgument):
        Token.unpack(token.pack())


@pytest.mark.parametrize("greeting", [Greeting(1, 4, "w", "decode-1"), Greeting(1, 5, "w", "decode-2")])
async def test_a_writer_that_looks_for_another_incarnation_is_told_so(link, greeting):
    assert await hostile(link, greeting.pack()) == STALE
