"""The examples do what they say against a running gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import bytemodel, fakeworkers
from tests.support.frontstack import FrontStack

ROOT = Path(__file__).parents[3]
CALL = (
    '</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
    '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def answering(prompt: object) -> list[int]:
    """A model that calls `get_weather` once it is offered and answers afterwards."""
    text = bytemodel.tokenizer().decode(list(prompt), skip_special_tokens=False)  # type: ignore[call-overload]
    calls = '"name": "get_weather"' in text and "<tool_result>" not in text
    return [*bytemodel.encode(CALL if calls else "hm</think>It is 42."), bytemodel.EOS]


async def run(*command: str) -> str:
    """Runs an example to its end; returns what it printed. Fails with its errors."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60.0):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_openai_example_streams_and_uses_a_tool(stack: FrontStack) -> None:
    stack.script.answer = answering
    url = f"http://{stack.http}/v1"
    out = await run(sys.executable, "examples/openai_sdk.py", "--base-url", url, "--model", fakeworkers.MODEL)
    assert (
        "hm\nanswer: It is 42." in out
        and '[get_weather({"city": "Paris"})]' in out
        and out.rstrip().endswith("It is 42.")
    )


async def test_the_grpc_example_chats_and_continues(stack: FrontStack) -> None:
    stack.script.answer = answering
    out = await run(sys.executable, "examples/grpc_client.py", "--address", stack.grpc, "--model", fakeworkers.MODEL)
    assert out.startswith(f"models: {fakeworkers.MODEL}\n") and "It is 42." in out and "[-0.50" in out


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_the_curl_example_asks_and_streams(stack: FrontStack) -> None:
    stack.script.answer = answering
    out = await run("sh", "examples/curl.sh", f"http://{stack.http}", fakeworkers.MODEL)
    assert '"content":"It is 42."' in out and out.rstrip().endswith("data: [DONE]")
