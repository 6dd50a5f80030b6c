"""The evaluation command against a local endpoint: verdicts, exit status, explicit sampling, failures counted."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from models.nano import evaluate
from models.nano.course import Course, bars
from models.nano.data import smalltalk

SEEN: list[dict[str, Any]] = []


class Clerk(BaseHTTPRequestHandler):
    """Answers every question with the model's identity, or fails."""

    status: ClassVar[int] = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        SEEN.append(body)
        message = {"role": "assistant", "content": smalltalk.IDENTITY}
        reply = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    SEEN.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Clerk) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    return evaluate.main()


def test_missed_bar_is_reported_and_exits_one(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    status = run(monkeypatch, "--url", endpoint, "--n", "12", "--kinds", "smalltalk", "--json", str(path))
    (row,) = json.loads(path.read_text())["classes"]
    assert status == 1
    assert 0 < row["right"] < 12
    printed = capsys.readouterr().out
    assert "MISSED" in printed
    assert "greeting" in printed


def test_sampling_is_always_explicit(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--url", endpoint, "--n", "3", "--kinds", "arithmetic", "json")
    assert len(SEEN) == 6
    assert all(0 < body["temperature"] <= 0.05 and body["max_tokens"] > 0 and body["thinking"] for body in SEEN)


def test_failed_requests_are_counted_apart(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clerk, "status", 503)
    path = tmp_path / "figures.json"
    assert run(monkeypatch, "--url", endpoint, "--n", "4", "--kinds", "json", "--json", str(path)) == 1
    (row,) = json.loads(path.read_text())["classes"]
    assert (row["right"], row["errors"]) == (0, 4)


def test_without_a_terminal_every_tenth_is_a_line_with_the_time_left() -> None:
    console, now = Console(file=io.StringIO(), width=150), 0.0
    with bars(console) as progress, Course(progress, 1, 20, lambda: now).of("json") as advance:
        for done in range(1, 21):
            now = done * 3.0
            advance(done)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "json: 2 of 20 asked, 2 right, 6 s, about 54 s left"
    assert lines[-1] == "json: 20 of 20 asked, 20 right, 60 s, about 0 s left"


def test_unknown_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="unknown poetry; choose from arithmetic"):
        run(monkeypatch, "--url", "http://127.0.0.1:1/v1", "--kinds", "poetry")
