"""A V3 checkpoint with V3's kind of vocabulary and a chat template, from its folder to answers over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from engine.families import tiny
from tests.support import templatemodel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ASKED = [{"role": "user", "content": "hi </think> the"}]


def checkpoint(folder: Path) -> Path:
    """A tiny V3 checkpoint whose tokenizer is another's: ids of config.json follow it."""
    tiny.write("v3", folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = templatemodel.tokenizer(config["vocab_size"])
    ids = {
        "bos_token_id": tokenizer.token_to_id(templatemodel.BOS),
        "eos_token_id": tokenizer.token_to_id(templatemodel.EOS),
    }
    path.write_text(json.dumps(config | ids), encoding="utf-8")
    return templatemodel.dress(folder, templatemodel.R1, config["vocab_size"])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """Speaks to a stack of processes that serves the checkpoint."""
    folder = tmp_path_factory.mktemp("stack")
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "cli", "up", "--model", str(checkpoint(folder / "m")), "--http-port", "0"]
    process = subprocess.Popen(
        [*command, "--ready-file", str(ready)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder / "runtime")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        seen = []
        for line in process.stdout or ():
            seen.append(line)
            if line.startswith("ready:"):
                break
        else:
            pytest.fail("".join(seen))
        with httpx2.Client(base_url=f"http://{json.loads(ready.read_text())['http']}", timeout=120) as made:
            yield made
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


def chat(client: httpx2.Client, **fields: Any) -> httpx2.Response:
    body = {"model": "m", "messages": ASKED, "max_tokens": 24, "temperature": 0, "seed": 1}
    return client.post("/v1/chat/completions", json=body | fields)


def test_chat_answers_in_whole_and_in_a_stream(client: httpx2.Client) -> None:
    reply = chat(client)
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    message = whole["choices"][0]["message"]
    # `</think>` in a client's text is eight letters and more than one token.
    bare = chat(client, messages=[{"role": "user", "content": "hi  the"}]).json()
    assert whole["usage"]["prompt_tokens"] > bare["usage"]["prompt_tokens"] + 2
    assert message["reasoning_content"] or message["content"]
    events = [line.removeprefix("data: ") for line in chat(client, stream=True).text.splitlines() if line]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events if event != "[DONE]"]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]


def test_a_chat_that_does_not_fit_the_template_is_refused_by_field(client: httpx2.Client) -> None:
    reply = chat(client, messages=[{"role": "latest_reminder", "content": "x"}])
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[0].role"
