"""Real etcd and Redis for tests: loopback only, free ports. Can be killed, frozen and started again."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from random import SystemRandom

from fabric import binaries
from tests.support import procs

PASSWORD = "only-for-tests"
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

Command = Callable[[Path], Sequence[str]]
"""The command line that serves from a data folder."""


class Server:
    """One server process whose port stays the same over restarts."""

    def __init__(self, folder: Path, port: int, url: str, command: Command) -> None:
        self.port, self.url = port, url
        self.process: procs.Process
        self._folder, self._command = folder, command
        self._stack = ExitStack()
        self._starts = self._stores = 0

    def start(self, *, keep_data: bool = True) -> None:
        """Starts, on the data folder of the last start or on an empty one, and waits until it serves."""
        self._starts += 1
        self._stores += not keep_data
        data = self._folder / f"data-{self._stores}"
        data.mkdir(exist_ok=True)
        log = self._folder / f"server-{self._starts}.log"
        self.process = self._stack.enter_context(procs.spawn(self._command(data), log))
        _wait_for_port(self.port, self.process)

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self._stack.close()


@contextmanager
def etcd_server(folder: Path) -> Iterator[Server]:
    """A running etcd with its files under `folder`."""
    port, peer_port = free_ports(2)
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"

    def command(data: Path) -> list[str]:
        return [
            *(str(binaries.etcd()), "--name", "test", "--data-dir", str(data), "--logger", "zap"),
            *("--listen-client-urls", client, "--advertise-client-urls", client, "--log-level", "error"),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"test={peer}", "--unsafe-no-fsync"),
        ]

    with _running(Server(folder, port, f"etcd://127.0.0.1:{port}", command)) as server:
        yield server


@contextmanager
def redis_server(folder: Path) -> Iterator[Server]:
    """A running Redis behind PASSWORD with its files under `folder`; it keeps nothing on disk."""
    (port,) = free_ports(1)

    def command(data: Path) -> list[str]:
        return [
            *(str(binaries.redis_server()), "--port", str(port), "--bind", "127.0.0.1", "--requirepass", PASSWORD),
            *("--save", "", "--appendonly", "no", "--dir", str(data)),
        ]

    with _running(Server(folder, port, f"redis://:{PASSWORD}@127.0.0.1:{port}/0", command)) as server:
        yield server


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds now, all different; for programs that cannot choose and tell one themselves.

    The kernel gives no port of this range away by itself, so that none is gone before its program takes it.
    """
    first_of_kernel = int(_KERNELS_PORTS.read_text().split()[0])
    drawn = SystemRandom().sample(range(first_of_kernel // 2, first_of_kernel), 50 * count)
    return list(islice(filter(_is_free, drawn), count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextmanager
def _running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.close()


def _wait_for_port(port: int, process: procs.Process, timeout_s: float = 20.0) -> None:
    """Returns when the port accepts. Raises ProcessFailed with the log when it does not."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
            return
        except OSError:
            time.sleep(0.02)
    raise procs.ProcessFailed(f"port {port} did not open\n{process.tail()}")
