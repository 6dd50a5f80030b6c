"""Child processes for tests: the only place that spawns. Logs go to a file, every child is killed by id at exit."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class ProcessFailed(AssertionError):
    """A child did not do what a test waited for; carries the end of its log."""


class Process:
    """One child whose standard output is read line by line and whose standard error is a log file."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._log_file = log.open("wb")
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, timeout_s: float = 20.0) -> str:
        """The next line of standard output. Raises ProcessFailed when none comes."""
        try:
            text = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ProcessFailed(f"no line within {timeout_s} s\n{self.tail()}") from None
        if text is None:
            raise ProcessFailed(f"output ended, exit code {self._process.poll()}\n{self.tail()}")
        return text

    def json(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """The next line that is a JSON object: such as a service's ready line."""
        ends = time.monotonic() + timeout_s
        while True:
            text = self.line(max(0.0, ends - time.monotonic()))
            if text.startswith("{"):
                loaded: dict[str, Any] = json.loads(text)
                return loaded

    def rest(self, timeout_s: float = 20.0) -> str:
        """Everything it still writes until its output ends."""
        lines = []
        while (text := self._lines.get(timeout=timeout_s)) is not None:
            lines.append(text)
        return "\n".join(lines)

    def tell(self, text: str) -> None:
        """Writes one line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def freeze(self) -> None:
        """SIGSTOP, then waits until every thread stands: on a busy machine the others run on for a while."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, then waits until it is gone."""
        self._process.kill()
        self._process.wait(10)

    def wait(self, timeout_s: float = 20.0) -> int:
        """Its exit code. Raises ProcessFailed when it does not end."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessFailed(f"still running after {timeout_s} s\n{self.tail()}") from None

    def tail(self, characters: int = 4000) -> str:
        self._log_file.flush()
        return self.log.read_text(errors="replace")[-characters:]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout, self._log_file):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._lines.put(text.rstrip("\n"))
        self._lines.put(None)


@contextmanager
def spawn(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[Process]:
    """A child process for the body of the context."""
    process = Process(command, log, env)
    try:
        yield process
    finally:
        process.close()


def python(*arguments: str) -> list[str]:
    """Command line of this Python: `python("-m", "services.decode", "--check")`."""
    return [sys.executable, *arguments]


@contextmanager
def service(name: str, log_dir: Path, *arguments: str) -> Iterator[tuple[Process, dict[str, Any]]]:
    """A service of ours, ready: yields the process and its ready line."""
    with spawn(python("-m", f"services.{name}", *arguments), log_dir / f"{name}.log") as process:
        yield process, process.json(60.0)
