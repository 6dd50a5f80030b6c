"""The chassis as a process: exit codes, ready line, signals, and peers that die or freeze."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fabric.channels import Channels, call, stream
from fabric.errors import Unavailable
from tests.support import procs
from tests.support.echo import EchoStub

ECHO = ("-m", "tests.support.echo", "--discovery", "memory://")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def begin(*arguments: str) -> procs.Process:
            log = tmp_path / f"echo-{len(list(tmp_path.iterdir()))}.log"
            return stack.enter_context(procs.spawn(procs.python(*ECHO, *arguments), log))

        yield begin


def test_check_print_config_and_wrong_settings_have_their_exit_codes(start):
    checked = start("--check")
    assert (checked.wait(), checked.line()) == (0, "settings are valid")
    printed = start("--print-config", "--max-sequences", "3")
    assert printed.wait() == 0
    text = printed.rest()
    assert json.loads(text)["max_sequences"] == 3
    assert "hush-hush" not in text
    wrong = start("--max-sequences", "none")
    assert wrong.wait() == 2
    assert "--max-sequences" in wrong.tail()


def test_a_busy_port_and_a_failed_build_exit_with_1_and_the_fix(start):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        busy = start("--listen", f"127.0.0.1:{port}")
        assert busy.wait() == 1
        assert f"127.0.0.1:{port}" in busy.tail() and "--listen" in busy.tail()
    failed = start("--fail-build")
    assert failed.wait() == 1
    assert "told to fail" in failed.tail()


def test_without_etcd_it_ends_soon_and_says_so(start):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    lost = start("--discovery", f"etcd://127.0.0.1:{port}", "--discovery-wait-s", "0.5")
    assert lost.wait() == 1
    assert "start etcd" in lost.tail()


def test_the_ready_file_holds_the_ready_line(start, tmp_path):
    file = tmp_path / "ready.json"
    ready = start("--ready-file", str(file)).json()
    assert json.loads(file.read_text()) == ready
    assert ready["service"] == "echo" and ready["address"].startswith("127.0.0.1:")


def test_a_ready_file_that_cannot_be_written_ends_the_start_with_the_fix(start, tmp_path):
    failed = start("--ready-file", str(tmp_path / "missing" / "ready.json"))
    assert failed.wait() == 1
    assert "--ready-file" in failed.tail() and "Traceback" not in failed.tail() and "never awaited" not in failed.tail()


async def test_sigterm_lets_50_streams_end_and_exits_with_0(start):
    process = start()
    async with Channels() as channels:
        stub = channels.stub(EchoStub, process.json()["address"])

        async def consume(begun: asyncio.Event) -> int:
            replies = 0
            async for _ in stream(stub.Stream, b"60,0.05", timeout_s=20.0):
                replies += 1
                begun.set()
            return replies

        events = [asyncio.Event() for _ in range(50)]
        streams = [asyncio.create_task(consume(begun)) for begun in events]
        await asyncio.gather(*(begun.wait() for begun in events))
        process.terminate()
        assert await asyncio.gather(*streams) == [60] * 50
        assert await asyncio.to_thread(process.wait) == 0
        assert process.json() == {"event": "closed", "active": 0}


async def test_log_lines_are_json_with_service_instance_and_request_id(start):
    process = start()
    ready = process.json()
    async with Channels() as channels:
        stub = channels.stub(EchoStub, ready["address"])
        await stub.Unary(b"a prompt", metadata=(("x-request-id", "request-7"),))
    line = next(text for text in _logged(process, '"event": "call"').splitlines() if '"call"' in text)
    logged = json.loads(line)
    assert (logged["service"], logged["instance"], logged["request_id"]) == ("echo", ready["instance"], "request-7")
    assert "a prompt" not in process.tail()


def test_sigterm_while_starting_exits_with_0(start):
    process = start("--discovery", "etcd://127.0.0.1:1")
    assert "etcd does not answer" in _logged(process, "etcd does not answer")
    process.terminate()
    assert process.wait() == 0


def test_sigterm_while_a_thread_loads_does_not_wait_for_it(start):
    process = start("--loading-s", "300")
    assert process.json() == {"event": "loading"}
    process.terminate()
    assert process.wait() == 0


async def test_a_killed_peer_is_noticed_at_once_and_a_frozen_one_within_3_s(start):
    killed, frozen = start(), start()
    async with Channels() as channels:
        assert await _noticed_after(channels, killed, killed.kill) < 0.5
        assert await _noticed_after(channels, frozen, frozen.freeze) < 3.0


async def test_a_peer_that_comes_back_is_reached_again(start):
    first = start()
    address = first.json()["address"]
    async with Channels() as channels:
        stub = channels.stub(EchoStub, address)
        assert await call(stub.Unary, b"a", timeout_s=5.0) == b"a"
        await asyncio.to_thread(first.kill)
        with pytest.raises(Unavailable):
            await call(stub.Unary, b"a", timeout_s=5.0)
        start("--listen", address).json()
        async with asyncio.timeout(10.0):
            while True:
                try:
                    assert await call(stub.Unary, b"b", timeout_s=5.0) == b"b"
                    return
                except Unavailable:
                    await asyncio.sleep(0.05)


async def _noticed_after(channels: Channels, process: procs.Process, hit: Any) -> float:
    """Seconds from the hit until a running stream fails as Unavailable."""
    stub = channels.stub(EchoStub, process.json()["address"])
    replies = stream(stub.Stream, b"100000,0.01", timeout_s=30.0)
    await anext(replies)
    started = time.monotonic()
    await asyncio.to_thread(hit)
    with pytest.raises(Unavailable):
        async for _ in replies:
            pass
    return time.monotonic() - started


def _logged(process: procs.Process, text: str, timeout_s: float = 20.0) -> str:
    ends = time.monotonic() + timeout_s
    while text not in process.tail() and time.monotonic() < ends:
        time.sleep(0.02)
    return process.tail()
