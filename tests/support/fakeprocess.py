"""A fake worker in a process of its own, to be killed, frozen or kept busy: `hold S` on its input does that."""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from fabric.discovery import MemberInfo, open_discovery
from tests.support import bytemodel, fakeworkers, procs
from tests.support.fakeworkers import Script
from tests.support.frontstack import FrontStack

TOKENS = 120
EPOCH = 7


def counted(prompt: Sequence[int]) -> list[int]:
    """An answer in which a token that is lost or comes twice is seen."""
    letters = "".join(chr(ord("a") + index % 26) for index in range(TOKENS))
    return [*bytemodel.encode(letters), bytemodel.EOS]


@asynccontextmanager
async def worker_process(
    stack: FrontStack, log: Path, service: str = "decode", pause_s: float = 0.0, discovery: str = ""
) -> AsyncIterator[procs.Process]:
    """A child that the stack's gateway knows and, for now, prefers: all others say that they drain.

    A decode pauses after each token; a prefill takes prompts and never gets done with one. The child registers itself
    where `discovery` says, or is registered here without one.
    """
    command = procs.python("-m", "tests.support.fakeprocess", service, str(pause_s), discovery or "memory://child")
    with procs.spawn(command, log) as child:
        address = (await asyncio.to_thread(child.json))["address"]
        member = MemberInfo(service, f"{service}-child", address, EPOCH, model=fakeworkers.MODEL)
        async with AsyncExitStack() as registered:
            if not discovery:
                await registered.enter_async_context(open_discovery(stack.discovery).register(member))
            await drain_others(stack, draining=True, service=service)
            yield child


async def drain_others(stack: FrontStack, draining: bool, service: str = "decode") -> None:
    """The workers beside the child take work, or none."""
    for served in stack.decodes if service == "decode" else stack.prefills:
        await served.worker.report(draining=draining)
        await served.worker.heard()


async def _serve(service: str, pause_s: float, discovery: str) -> None:
    async with AsyncExitStack() as stack:
        script = Script(answer=counted, pause_s=pause_s, gates={"prefill": asyncio.Event()})
        served = await fakeworkers.serve(stack, open_discovery(discovery), service, script, f"{service}-child")
        print(json.dumps({"address": served.address}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command, _, argument = line.partition(" ")
            if command == "hold":
                print(json.dumps({"held": True}), flush=True)
                ctypes.PyDLL(None).usleep(int(float(argument) * 1e6))  # a PyDLL call keeps the GIL
                print(json.dumps({"held": False}), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
