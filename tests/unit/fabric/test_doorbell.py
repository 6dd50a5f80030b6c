"""Notices between links of one host: each arrives once or its sender is told that it did not."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from fabric.kvlink.doorbell import Doorbell
from fabric.kvlink.inbox import CAPACITY, Inbox
from fabric.kvlink.link import Notice

HERE = Notice("other", 1, b"fills the room")


@pytest.fixture
async def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
async def receiver(inbox: Inbox) -> Iterator[Doorbell]:
    bell = Doorbell("decode-1", 4, inbox)
    yield bell
    bell.close()
    bell.close()


@pytest.fixture
async def sender() -> Iterator[Doorbell]:
    bell = Doorbell("prefill-1", 2**63, Inbox())
    yield bell
    bell.close()


async def taken(inbox: Inbox, count: int) -> list[Notice]:
    found: list[Notice] = []
    async with asyncio.timeout(10.0):
        async for notice in inbox:
            found.append(notice)
            if len(found) == count:
                return found
    raise AssertionError("the inbox was closed")


async def test_a_notice_names_its_sender_and_arrives_as_it_was(inbox, receiver, sender):
    large = bytes(range(256)) * 400
    assert sender.ring(receiver.where, b"small") and sender.ring(receiver.where, large)
    assert await taken(inbox, 2) == [Notice("prefill-1", 2**63, b"small"), Notice("prefill-1", 2**63, large)]


async def test_what_its_receiver_would_cut_is_not_delivered_though_the_socket_has_room(inbox, receiver, sender):
    sender._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    assert not sender.ring(receiver.where, bytes(300_000))
    assert sender.ring(receiver.where, b"next") and (await taken(inbox, 1))[0].payload == b"next"


async def test_who_is_not_reached_is_not_told(receiver, sender):
    host, _, label = receiver.where.partition("/")
    assert not sender.ring("", b"x")
    assert not sender.ring(host, b"x")
    assert not sender.ring(f"{host}/{'0' * 32}", b"x")
    assert not sender.ring(f"{'0' * 32}/{label}", b"x")  # another host
    assert not sender.ring(receiver.where, bytes(4 << 20))  # more than a datagram
    receiver.close()
    assert not sender.ring(receiver.where, b"x")
    sender.close()
    assert not sender.ring(receiver.where, b"x")


async def test_a_receiver_that_takes_nothing_is_full_soon_and_loses_nothing(inbox, receiver, sender):
    sent = 0
    while sender.ring(receiver.where, str(sent).encode()):  # no turn of the event loop: nothing is taken
        sent += 1
    assert sent >= 1
    assert [int(notice.payload) for notice in await taken(inbox, sent)] == list(range(sent))


async def test_what_finds_no_room_in_the_inbox_waits(inbox, receiver, sender):
    inbox.put_now([HERE] * CAPACITY)
    assert sender.ring(receiver.where, b"late")
    assert await taken(inbox, CAPACITY) == [HERE] * CAPACITY
    assert [notice.payload for notice in await taken(inbox, 1)] == [b"late"]


@pytest.mark.parametrize(
    "garbage", [b"", b"x", bytes(9), bytes(8) + b"\xff\xff" + b"name", bytes(8) + b"\x01\x00\xffx"]
)
async def test_garbage_is_dropped_and_what_follows_is_taken(inbox, receiver, sender, garbage):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(garbage, b"\0deepinfer-" + receiver.where.partition("/")[2].encode())
    assert sender.ring(receiver.where, b"good")
    assert [notice.payload for notice in await taken(inbox, 1)] == [b"good"]


async def test_another_user_is_not_heard(inbox, receiver, sender, monkeypatch):
    monkeypatch.setattr(receiver, "_users", {os.getuid() + 1})
    assert sender.ring(receiver.where, b"x")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await taken(inbox, 1)
