"""Worker processes beside a stack in this process: one side of a handoff can be killed, frozen or drained for real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

from fabric.channels import Channels, call
from fabric.processes import this_process
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import prefill_pb2
from services.decode import service as decode_service
from services.decode.settings import DecodeSettings
from services.prefill import service as prefill_service
from services.prefill.settings import PrefillSettings
from tests.support import procs
from tests.support.stack import Running, Stack

_WORKER = {"batch_invariant": True, "kv_memory_mb": 64, "landing_mb": 32, "chunk_tokens": 128}


class _NoChassis:
    async def close(self) -> None:
        """Whoever spawned the process ends it."""


@dataclass(slots=True)
class RemotePrefill:
    """A prefill process and how a gateway names it."""

    process: procs.Process
    running: Running
    incarnation: common.Incarnation


@dataclass(slots=True)
class RemoteDecode:
    """A decode process and a stack that uses it."""

    stack: Stack
    process: procs.Process
    metrics: str

    async def metric(self, name: str) -> float:
        """What the process exports under this name."""

        def read() -> str:
            with urlopen(f"http://{self.metrics}/metrics", timeout=10.0) as reply:
                return str(reply.read().decode())

        lines = (await asyncio.to_thread(read)).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def use(stack: Stack, prefill: RemotePrefill) -> None:
    """From here on the stack's requests go to this prefill."""
    stack.running["prefill"], stack.writer = prefill.running, prefill.incarnation


@asynccontextmanager
async def decode_alone(model: Path, transport: str) -> AsyncIterator[Stack]:
    """A decode worker in this process, so that its memory can be looked at."""
    settings = DecodeSettings(model=model, discovery="memory://remote", transport=transport, **_WORKER)
    async with AsyncExitStack() as exits:
        stack = Stack(await exits.enter_async_context(Channels()))
        exits.push_async_callback(stack.close)
        await stack.start("decode", settings, decode_service.build)
        yield stack


@asynccontextmanager
async def prefill_process(
    stack: Stack, log: Path, model: Path, transport: str, *arguments: str
) -> AsyncIterator[RemotePrefill]:
    """A prefill worker in a process of its own."""
    options = [text for name, value in _WORKER.items() for text in flag(name, value)]
    fixed = ["--model", str(model), "--discovery", "memory://", "--no-kvstore", "--transport", transport]
    with procs.spawn(procs.python("-m", "services.prefill", *fixed, *options, *arguments), log) as process:
        ready = await asyncio.to_thread(process.json, 120.0)
        # What a stack asks of the model of a prefill worker, decode's own can tell.
        running = Running(_NoChassis(), ready["address"], SimpleNamespace(core=stack.running["decode"].servicer.core))  # type: ignore[arg-type]
        use(stack, RemotePrefill(process, running, common.Incarnation()))
        info: Any = await call(stack.prefill.Info, prefill_pb2.PrefillServiceInfoRequest())
        packed = process_id(process.pid)
        yield RemotePrefill(
            process, running, common.Incarnation(instance=info.instance, epoch=info.epoch, process=packed)
        )


@asynccontextmanager
async def decode_process(
    log: Path, model: Path, transport: str, *arguments: str, **prefill: Any
) -> AsyncIterator[RemoteDecode]:
    """A decode worker in a process of its own, and the prefill worker of the stack in this one."""
    shared = {"model": model, "discovery": "memory://remote", "kvstore": False, "transport": transport, **_WORKER}
    settings = PrefillSettings(**(shared | prefill))
    options = [text for name, value in _WORKER.items() for text in flag(name, value)]
    fixed = ["--model", str(model), "--discovery", "memory://", "--transport", transport]
    async with AsyncExitStack() as exits:
        command = procs.python("-m", "services.decode", *fixed, *options, *arguments)
        process = exits.enter_context(procs.spawn(command, log))
        stack = Stack(await exits.enter_async_context(Channels()))
        exits.push_async_callback(stack.close)
        await stack.start("prefill", settings, prefill_service.build)
        ready = await asyncio.to_thread(process.json, 120.0)
        stack.running["decode"] = Running(_NoChassis(), ready["address"], None)  # type: ignore[arg-type]
        yield RemoteDecode(stack, process, ready["metrics"])


def flag(name: str, value: object) -> list[str]:
    """One setting as command-line arguments."""
    option = f"--{name.replace('_', '-')}"
    return [option] if value is True else [option, str(value)]


def process_id(pid: int) -> str:
    """A child's packed ProcessId, as it announces it itself."""
    here = this_process()
    assert here is not None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return replace(here, pid=pid, started=int(fields[19])).pack()
