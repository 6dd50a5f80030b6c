"""`deepinfer up` as a user runs it: real processes from the first line to the last cleanup."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil
import pytest
from openai import OpenAI

from models import nano
from models.nano.data import toolcalls
from models.nano.data.check import correct
from models.nano.data.mixture import classes, evaluation_problems

README = (Path(__file__).parents[2] / "README.md").read_text()
README_HTTP, README_GRPC = "127.0.0.1:8000", "127.0.0.1:50051"

pytestmark = pytest.mark.timeout(300)

UP = [sys.executable, "-m", "cli", "up", "--http-port", "0"]
SERVICES = {"etcd", "redis", "kvstore", "recipe", "prefill-0", "decode-0", "gateway"}


def blocks(language: str) -> list[str]:
    """Code blocks of the README in one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


README_PROGRAMS = blocks("python")


class Up:
    """A running `deepinfer up` with its output."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.ready_file = folder / "ready.json"
        self.runtime = folder / "runtime"
        self.logs = folder / "logs"
        self.process = subprocess.Popen(
            [*UP, "--ready-file", str(self.ready_file), "--log-dir", str(self.logs), *options],
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, start: str) -> str:
        """The next line that starts so; fails with the whole output when there is none."""
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if line.startswith(start):
                return line
        pytest.fail(f"no line starts with {start!r} in:\n{''.join(seen)}")

    @property
    def record(self) -> dict:
        return json.loads(self.ready_file.read_text())

    def ask(self) -> dict:
        body = {"model": self.record["model"], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        reply = httpx2.post(f"http://{self.record['http']}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stop(self, signum: int) -> tuple[int, str]:
        self.process.send_signal(signum)
        rest = self.process.stdout.read()
        return self.process.wait(timeout=90), rest

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=30)
        self.process.stdout.close()


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Up]:
    running = Up(folder, *options)
    try:
        running.until("ready:")
        yield running
    finally:
        running.kill()


@pytest.fixture
def up(tmp_path) -> Iterator[Up]:
    """A stack of the test's own, to be mistreated."""
    with serving(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Up]:
    """A stack shared by tests that only talk to it."""
    with serving(tmp_path_factory.mktemp("stack")) as running:
        yield running


def living(pids) -> list[psutil.Process]:
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", range(len(README_PROGRAMS)))
def test_the_first_requests_of_the_readme_are_answered(stack, number):
    program = README_PROGRAMS[number]
    for written, real in ((README_HTTP, stack.record["http"]), (README_GRPC, stack.record["grpc"])):
        program = program.replace(written, real)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), program


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line_of_the_readme_streams(stack):
    [line] = [block for block in blocks("sh") if block.startswith("curl")]
    done = subprocess.run(
        ["bash", "-c", line.replace(README_HTTP, stack.record["http"])],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    events = [text for text in done.stdout.splitlines() if text]
    assert events[-1] == "data: [DONE]", done.stdout[-500:] + done.stderr
    assert len(events) > 2


def test_the_openai_client_streams_a_tool_call_that_is_right(stack):
    kind = next(each for each in classes(len) if each.kind == toolcalls.CALL_KIND)
    [problem] = evaluation_problems(kind, 1, seed=3)
    request = problem.request(stack.record["model"])
    with OpenAI(base_url=f"http://{stack.record['http']}/v1", api_key="any", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model=request["model"],
                messages=request["messages"],
                tools=request["tools"],
                temperature=0.01,
                seed=1,
                max_tokens=400,
                stream=True,
                extra_body={"thinking": request["thinking"]},
            )
        )
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or []]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert pieces[0].id and len(chunks) > 2
    function = {
        "name": "".join(piece.function.name or "" for piece in pieces),
        "arguments": "".join(piece.function.arguments or "" for piece in pieces),
    }
    assert correct(problem, {"content": "", "tool_calls": [{"function": function}]}), (problem.calls, function)


def test_chat_answers_from_a_pipe_and_finds_the_stack_by_itself(stack):
    done = subprocess.run(
        [sys.executable, "-m", "cli", "chat", "--max-tokens", "8"],
        input="Hello\n/think off\nAnd you?\n/quit\n",
        env={**os.environ, "XDG_RUNTIME_DIR": str(stack.runtime)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens/s") == 2, done.stdout
    assert "thinking: off" in done.stdout


@pytest.mark.chaos
def test_a_stack_serves_survives_a_killed_worker_and_leaves_nothing_behind(up):
    pids = up.record["pids"]
    assert set(pids) == SERVICES
    assert up.ask()["choices"][0]["finish_reason"] in ("stop", "length")

    os.kill(pids["decode-0"], signal.SIGKILL)
    up.until("ready:")
    after = up.record["pids"]
    assert after["decode-0"] != pids["decode-0"]
    assert {name: pid for name, pid in after.items() if name != "decode-0"} == {
        name: pid for name, pid in pids.items() if name != "decode-0"
    }
    assert up.ask()["usage"]["completion_tokens"] > 0

    code, rest = up.stop(signal.SIGTERM)
    assert code == 0
    ended = [line.split()[0] for line in rest.splitlines() if line.split()[1:2] == ["stopped"]]
    assert set(ended) == SERVICES
    assert ended[0] == "gateway"
    assert living(after.values()) == []
    assert not up.ready_file.exists()
    assert [path for path in up.runtime.rglob("*") if path.name.startswith("stack-")] == []


@pytest.mark.chaos
def test_services_do_not_outlive_a_stack_that_is_killed(up):
    processes = living(up.record["pids"].values())
    assert len(processes) == len(SERVICES)
    up.kill()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow  # continuous integration runs the same command as a step of its own
def test_smoke_asks_one_question_and_ends_well(tmp_path):
    done = subprocess.run(
        [*UP, "--smoke"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("question", "answer", "timings"):
        assert any(line.startswith(word) for line in done.stdout.splitlines()), done.stdout


def test_a_busy_port_is_refused_before_anything_is_started(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = subprocess.run(
            [*UP[:-1], str(port)],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "--http-port" in done.stderr
    assert done.stdout == ""


def test_a_truncated_checkpoint_is_named_and_nothing_stays_behind(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for path in Path(nano.__file__).parent.glob("*.*"):
        if path.suffix in (".json", ".safetensors"):
            (model / path.name).write_bytes(path.read_bytes()[: 10_000 if path.suffix == ".safetensors" else None])
    done = subprocess.run(
        [*UP, "--model", str(model)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert ".safetensors" in done.stderr
    assert list((tmp_path / "runtime").rglob("stack-*")) == []
