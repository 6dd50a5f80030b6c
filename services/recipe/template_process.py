"""The process that renders a chat template: started, asked, killed when late, started again. Knows no conversation."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any

from fabric.errors import DeadlineExceeded, Exhausted, StartError, Unavailable

_PROGRAM = Path(__file__).with_name("template_child.py")
_MOST_REPLY_BYTES = 1 << 28


class TemplateProcess:
    """One template. `ask` from any thread: one request at a time, answered within `timeout_s` seconds or killed."""

    def __init__(self, source: str, where: Path, timeout_s: float) -> None:
        """Starts the process.

        Raises:
            StartError: the template does not compile, or its process does not start; names the file `where`.
        """
        self._source, self._timeout_s = source, timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        try:
            failed = self._start()
        except (OSError, ValueError) as error:
            failed = f"its process does not start ({type(error).__name__})"
        if failed:
            self.close()
            raise StartError(
                f"the chat template in {where} cannot be used: {failed}",
                field="model",
                fix="download the file again, or choose --dialect plain",
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The child's reply; see `template_child.render`.

        Raises:
            DeadlineExceeded: no reply in time.
            Exhausted: other requests did not leave time for this one.
            Unavailable: the process ended; the next request starts another.
        """
        if not self._lock.acquire(timeout=self._timeout_s):
            raise Exhausted("the chat template is busy", fix="retry later", retry_after_s=0.2)
        try:
            if self._socket is None:
                self._start()
            return self._exchange(request)
        except TimeoutError as error:
            self._kill()
            raise DeadlineExceeded(f"the chat template took more than {self._timeout_s:.3g} s") from error
        except (OSError, ValueError) as error:
            self._kill()
            raise Unavailable("the process of the chat template ended", fix="retry") from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the process, if there is one."""
        with self._lock:
            self._kill()

    def _start(self) -> str:
        """Why the template does not compile, or nothing."""
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-I", str(_PROGRAM), str(theirs.fileno())]
        with theirs:
            # A session of its own: an interrupt at the terminal is for the service, which closes this when it drained.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env={}, pass_fds=[theirs.fileno()], start_new_session=True
            )
        return str(self._exchange(self._source).get("failed", ""))

    def _exchange(self, tree: Any) -> dict[str, Any]:
        if self._socket is None:
            raise ConnectionError("not started")
        until = monotonic() + self._timeout_s
        packed = json.dumps(tree).encode()
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(len(packed).to_bytes(4) + packed)
        size = int.from_bytes(_receive(self._socket, 4, until))
        if size > _MOST_REPLY_BYTES:
            raise ValueError("the reply is too long")
        reply = json.loads(_receive(self._socket, size, until))
        if not isinstance(reply, dict):
            raise ValueError("the reply is not an object")
        return reply

    def _kill(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None


def _receive(connection: socket.socket, size: int, until: float) -> bytes:
    received = bytearray()
    while len(received) < size:
        left_s = until - monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise ConnectionError("the process ended")
        received += piece
    return bytes(received)
