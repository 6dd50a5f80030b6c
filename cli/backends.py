"""The etcd and the Redis that a local stack runs on: their command lines and how to tell that they serve."""

import asyncio
import json
from pathlib import Path

from cli import ports
from cli.task import Alive, Endpoints, Probe, Task
from fabric import binaries

# A laptop's worth: the index holds names of blocks, not blocks.
REDIS_MEMORY = "64mb"


def etcd(folder: Path, port: int) -> Task:
    """An etcd with an empty data folder below `folder`, reachable from this machine alone."""
    peer = f"http://{ports.LOOPBACK}:{ports.free()}"
    client = f"http://{ports.LOOPBACK}:{port}"

    async def probe() -> Endpoints | None:
        reply = await _exchange(port, f"GET /health HTTP/1.0\r\nHost: {ports.LOOPBACK}\r\n\r\n".encode())
        body = reply.partition(b"\r\n\r\n")[2]
        healthy = bool(body) and json.loads(body).get("health") == "true"
        return Endpoints(address=f"{ports.LOOPBACK}:{port}") if healthy else None

    command = (
        *(str(binaries.etcd()), "--name", "deepinfer", "--data-dir", str(folder / "etcd"), "--log-level", "warn"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"deepinfer={peer}"),
        # The data are leases of living processes: nothing of it is worth an fsync.
        "--unsafe-no-fsync",
    )
    # Idle threads of Go's scheduler wake each other: on one core an idle etcd takes half the time.
    environment = {"GOMAXPROCS": "1"}
    return Task(
        "etcd", "etcd", command, reset=_nothing, probe=probe, environment=environment, drain_rank=3, alive=_still(probe)
    )


def redis(folder: Path, port: int, password: str) -> Task:
    """A Redis cache behind `password`, reachable from this machine alone, without persistence."""
    config = folder / "redis.conf"
    # In a file, since command lines are visible to every user of the machine.
    config.write_text(
        f"bind {ports.LOOPBACK}\nport {port}\nrequirepass {password}\nmaxmemory {REDIS_MEMORY}\n"
        # Its clockwork, once a second instead of ten times: nothing here expires in less.
        f'maxmemory-policy allkeys-lfu\nsave ""\nappendonly no\nhz 1\ndir {folder}\n'
    )
    config.chmod(0o600)

    async def probe() -> Endpoints | None:
        reply = await _exchange(port, f"AUTH {password}\r\nPING\r\nQUIT\r\n".encode())
        return Endpoints(address=f"{ports.LOOPBACK}:{port}") if b"+PONG" in reply else None

    command = (str(binaries.redis_server()), str(config))
    return Task("redis", "redis", command, reset=_nothing, probe=probe, drain_rank=3, alive=_still(probe))


def _still(probe: Probe) -> Alive:
    async def alive(_: Endpoints) -> bool:
        return await probe() is not None

    return alive


async def _exchange(port: int, request: bytes, timeout_s: float = 1.0) -> bytes:
    """All that the peer answers until it closes; empty when it does not answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(ports.LOOPBACK, port)
            try:
                writer.write(request)
                await writer.drain()
                return await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""


def _nothing() -> None:
    return None
