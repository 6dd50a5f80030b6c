"""Pushes bytes from one process of this machine into another and tells the lane. Knows the KV link alone."""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
from contextlib import aclosing
from typing import Any

import numpy as np

from fabric.errors import ServiceError
from fabric.kvlink import Link, Notice, Write, open_link
from fabric.records import LinkAddress

SIZE = 1 << 20
MARK = 0xA5
TIMEOUT_S = 30.0


def main(url: str) -> int:
    """Prints {"lane": ...} and returns 0; what went wrong goes to stderr as one line, and returns 1."""
    try:
        print(json.dumps({"lane": asyncio.run(_receive(url))}))
    except (ServiceError, TimeoutError) as error:
        print(str(error) or "nothing arrived in time", file=sys.stderr)
        return 1
    return 0


async def _receive(url: str) -> str:
    """Lane over which another process wrote into memory of this one."""
    link = open_link(url, "doctor-receiver", epoch=1)
    memory = link.allocate(SIZE)
    region = link.register(memory)
    arguments = (url, link.address, region.token.pack())
    sender = multiprocessing.get_context("spawn").Process(target=_send, args=arguments, daemon=True)
    try:
        sender.start()
        async with asyncio.timeout(TIMEOUT_S):
            notice = await _first_notice(link)
        if not bool((memory == MARK).all()):
            raise ServiceError("bytes that were announced did not arrive")
        return notice.payload.decode()
    finally:
        sender.kill()
        await asyncio.to_thread(sender.join, TIMEOUT_S)
        await link.close()


async def _first_notice(link: Link) -> Notice:
    notices: Any = link.notices()
    with link.expecting():
        async with aclosing(notices):
            notice: Notice = await anext(notices)
            return notice


def _send(url: str, address: LinkAddress, token: bytes) -> None:
    asyncio.run(_push(url, address, token))


async def _push(url: str, address: LinkAddress, token: bytes) -> None:
    link = open_link(url, "doctor-sender", epoch=1)
    region = link.register(np.full(SIZE, MARK, dtype=np.uint8))
    zero, size = np.zeros(1, dtype=np.int64), np.full(1, SIZE, dtype=np.int64)
    write = Write(region, zero, token, zero, size)
    # The lane is known once something went over it, so the first push has no notice and the second names it.
    await link.push(address, [write], timeout_s=TIMEOUT_S)
    await link.push(address, [write], notify=link.lane.encode(), timeout_s=TIMEOUT_S)
    await link.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m cli.linkprobe", description=__doc__)
    parser.add_argument("url", help="of the KV transport, such as ucx://")
    code = main(parser.parse_args().url)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # destructors of the wheel's libraries may crash, which says nothing about the transfer
