"""What strangers on a UCX port send ends nothing: the one thread of a link serves everybody."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from fabric.kvlink import open_link
from fabric.kvlink.link import Notice
from fabric.kvlink.ucx_agent import Agent, agent_name, incarnation


@pytest.mark.parametrize("name", ["stranger", "a#", "#7", "a#-1", "a#1.0", "a#" + "9" * 5000, b"\xff\xfe", "a#\u0663"])
def test_a_name_that_no_link_has_is_nobodys(name):
    assert incarnation(name) is None


def test_a_links_name_is_read_back():
    assert incarnation(agent_name("prefill#1", 7)) == ("prefill#1", 7)
    assert incarnation(agent_name("prefill-1", 7).encode()) == ("prefill-1", 7)


async def test_a_stranger_does_not_silence_the_others():
    here = open_link("ucx://", f"here-{time.monotonic_ns()}", 1)
    writer = open_link("ucx://", "writer", 3)
    here.register(np.zeros(4096, np.uint8))
    stranger = Agent("stranger")
    notices = here.notices()
    with here.expecting():
        stranger.notify(stranger.load_peer(here.address.metadata), b"\x14anything")
        stranger.notify(stranger.load_peer(here.address.metadata), b"\x10")
        async with asyncio.timeout(10.0):
            for payload in (b"first", b"second"):
                await writer.push(here.address, [], notify=payload, timeout_s=5.0)
                assert await anext(notices) == Notice("writer", 3, payload)
    stranger.close()
    await writer.close()
    await here.close()
