"""A real Redis for tests: empty, loopback only, with a password, on a free port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fabric import binaries
from tests.support import procs
from tests.support.etcd import free_ports, wait_for_port

PASSWORD = "only-for-tests"


class RedisServer:
    """One Redis process whose port stays the same over restarts; nothing is kept on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._starts = 0
        (self.port,) = free_ports(1)
        self.process: procs.Process

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._starts += 1
        command = [str(binaries.redis_server()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--requirepass", PASSWORD, "--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        log = self._folder / f"redis-{self._starts}.log"
        self.process = self._stack.enter_context(procs.spawn(command, log))
        wait_for_port(self.port, self.process)

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self._stack.close()


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """A running Redis with its files under `folder`."""
    server = RedisServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.close()
