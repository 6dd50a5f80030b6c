"""Asks an OpenAI endpoint, bounded in time and number; starts a stack when none is given. Knows no checker."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.nano.data.problem import Problem

Message = dict[str, Any]
Ask = Callable[[Problem], Message | str]
"""The assistant's message, or the text of the failure."""
READY_S, DRAIN_S, POLL_S = 300.0, 40.0, 0.2
MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Endpoint:
    """POSTs chat completions with explicit sampling: in thinking mode the recipe turns temperature 0 into 1."""

    url: str
    temperature: float
    timeout_s: float

    def __call__(self, problem: Problem) -> Message | str:
        body = problem.request() | {"temperature": self.temperature, "max_tokens": MAX_TOKENS, "stream": False}
        request = urllib.request.Request(  # noqa: S310  the user names the endpoint
            f"{endpoint_url(self.url)}/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:  # noqa: S310
                message: Message = json.load(reply)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            return f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}"
        except (OSError, ValueError, LookupError) as error:
            return f"{type(error).__name__}: {error}"
        return message


def answers(problems: Iterable[Problem], ask: Ask, concurrency: int) -> Iterator[tuple[Problem, Message | str]]:
    """Every problem with its answer, in order, at most `concurrency` in flight."""
    with ThreadPoolExecutor(concurrency) as pool:
        waiting = [(problem, pool.submit(ask, problem)) for problem in problems]
        for problem, future in waiting:
            yield problem, future.result()


@contextmanager
def started_stack() -> Iterator[str]:
    """A stack of local processes: yields its OpenAI URL, then drains it. RuntimeError when it is not ready."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        stack = subprocess.Popen([sys.executable, "-m", "cli", "up", "--http-port", "0", "--ready-file", str(ready)])
        try:
            yield _url(stack, ready)
        finally:
            stack.terminate()
            try:
                stack.wait(DRAIN_S)
            except subprocess.TimeoutExpired:
                stack.kill()


def endpoint_url(address: str) -> str:
    """The /v1 URL of an address with or without scheme and path."""
    with_scheme = address if "://" in address else f"http://{address}"
    return f"{with_scheme.rstrip('/').removesuffix('/v1')}/v1"


def _url(stack: subprocess.Popen[bytes], ready: Path) -> str:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if ready.exists() and (text := ready.read_text()):
            return endpoint_url(str(json.loads(text)["http"]))
        if stack.poll() is not None:
            raise RuntimeError(f"the stack ended with status {stack.returncode} before it was ready")
        time.sleep(POLL_S)
    raise RuntimeError(f"the stack was not ready within {READY_S:.0f} s")
