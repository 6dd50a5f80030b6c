"""Start and end of a process: identity, signals, background work, ports. Knows no gRPC and no service."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fabric.errors import StartError
from fabric.processes import claim_name
from fabric.telemetry import logs

_log = logs.get("lifecycle")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this incarnation of a process is. A later incarnation has a higher epoch."""

    instance: str
    epoch: int


def new_identity(service: str, instance: str = "") -> Identity:
    """Mints the identity of this process; `instance` keeps a name given by the operator.

    Raises:
        StartError: another process on this host has that name.
    """
    if instance:
        claim_name(f"{service}/{instance}")
    epoch = time.time_ns() // 1000
    return Identity(instance or f"{service}-{socket.gethostname()}-{os.getpid()}-{epoch % 1_000_000:06d}", epoch)


@asynccontextmanager
async def background(work: Coroutine[None, None, None], name: str) -> AsyncIterator[None]:
    """Runs `work` beside the body and cancels it at exit; its failure is logged at once."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.error("background work failed", task=task.get_name(), error=type(error).__name__, at=logs.frames(error))


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. A second signal takes the default action: the operator insists."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked(signum: int) -> None:
        _log.info("asked to stop", signal=signal.Signals(signum).name)
        stop.set()
        loop.remove_signal_handler(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked, signum)
    return stop


def split_address(address: str, field: str) -> tuple[str, int]:
    """("host", port) of "host:port". Raises StartError naming the setting `field`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise StartError(f"{address!r} is not host:port", field=field, fix="such as 127.0.0.1:0")
    return host.strip("[]"), int(port)


def check_port_free(address: str, field: str) -> None:
    """Raises StartError where another process holds the port: better before a model is loaded than after."""
    host, port = split_address(address, field)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise port_error(address, field) from error


def port_error(address: str, field: str) -> StartError:
    return StartError(
        f"cannot listen on {address}: the port is in use or not ours",
        field=field,
        fix=f"stop the process that holds it, or choose another with --{field} (port 0 takes a free one)",
    )
