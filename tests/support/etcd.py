"""A real etcd for tests: fresh data, loopback only, free ports. Can be killed, frozen and started again."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fabric import binaries
from tests.support import procs


class EtcdServer:
    """One etcd process whose client port stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._starts = 0
        self.port, self._peer_port = free_ports(2)
        self.process: procs.Process

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    def start(self, *, keep_data: bool = True) -> None:
        """Starts, with the data of the last start or with an empty store, and waits until it serves."""
        self._starts += 1
        data = self._folder / ("data" if keep_data else f"data-{self._starts}")
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        command = [str(binaries.etcd()), "--name", "test", "--data-dir", str(data), "--logger", "zap"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--log-level", "error"]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"test={peer}", "--unsafe-no-fsync"]
        log = self._folder / f"etcd-{self._starts}.log"
        self.process = self._stack.enter_context(procs.spawn(command, log))
        wait_for_port(self.port, self.process)

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self._stack.close()


@contextmanager
def etcd_server(folder: Path) -> Iterator[EtcdServer]:
    """A running etcd with its files under `folder`."""
    server = EtcdServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.close()


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds now, all different; for programs that cannot choose and tell one themselves."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def wait_for_port(port: int, process: procs.Process, timeout_s: float = 20.0) -> None:
    """Returns when the port accepts. Raises ProcessFailed with the log when it does not."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
            return
        except OSError:
            time.sleep(0.02)
    raise procs.ProcessFailed(f"port {port} did not open\n{process.tail()}")
