"""The HTTP surface: strict before any work, honest about state."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.gateway.tenants import hash_key
from tests.support.frontstack import FrontStack, front_stack


async def test_operators_see_how_well_it_is_known_what_workers_cache(tmp_path: Path) -> None:
    known = 'deepinfer_gateway_cache_knowledge_workers{{knowledge="{}"}} {}'
    async with front_stack(tmp_path) as stack:  # of its own: others' tests leave doubts behind
        await shown(stack, known.format("exact", "2.0"))
        await stack.prefills[0].worker.report(keys_base=4, keys_version=5)  # from a version that never came
        await shown(stack, known.format("degraded", "1.0"))
        await shown(stack, known.format("exact", "1.0"))
        await shown(stack, 'deepinfer_gateway_cache_doubts_total{reason="gap"} 1.0')


async def shown(stack: FrontStack, line: str) -> None:
    """Waits until the metrics have this line: a status that was sent is not taken yet. Raises TimeoutError."""
    async with asyncio.timeout(5.0):
        while line not in (await stack.client.get("/metrics")).text:  # noqa: ASYNC110  another service decides
            await asyncio.sleep(0.01)


async def test_operators_find_what_they_look_for(stack: FrontStack) -> None:
    await stack.chat()
    assert (await stack.client.get("/health")).json() == {"status": "ok"}
    assert (await stack.client.get("/ready")).json() == {"status": "ready"}
    assert (await stack.client.get("/version")).json()["version"]
    metrics = (await stack.client.get("/metrics")).text
    assert 'deepinfer_gateway_requests_total{code="ok",surface="http_chat"}' in metrics
    assert "deepinfer_gateway_time_to_first_token_seconds_count" in metrics
    assert "requestBody" in (await stack.client.get("/openapi.json")).json()["paths"]["/v1/chat/completions"]["post"]


@pytest.mark.parametrize(
    ("raw", "status", "param"),
    [
        (b"{", 400, "body"),
        (b"[" * 10_000, 400, "body"),
        (b'{"model":"bytes","messages":[]}', 400, "messages"),
        (b'{"model":"bytes","messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, "temperature"),
        (b'{"model":"bytes","messages":[{"role":"user","content":"x"}],"max_tokens":2147483648}', 400, "max_tokens"),
        (b'{"model":"bytes","messages":[{"role":"user","content":"x"}],"max_tokens":4096}', 400, "max_tokens"),
        (b'{"model":"bytes","messages":[{"role":"user","content":"x"}],"max_tokens":4090}', 400, "max_tokens"),
        (
            b'{"model":"bytes","messages":[{"role":"user","content":"x"}],"max_completion_tokens":4096}',
            400,
            "max_completion_tokens",
        ),
        (
            b'{"model":"bytes","messages":[{"role":"user","content":"x"}],"max_completion_tokens":4090}',
            400,
            "max_completion_tokens",
        ),
        (b'{"model":"none","messages":[{"role":"user","content":"x"}]}', 404, "model"),
        (b'{"model":"bytes","messages":[{"role":"user","content":"' + b"x" * 5000 + b'"}]}', 400, "messages"),
        (b'{"model":"bytes","messages":[{"role":"user","content":"x"}],"best_of":2}', 400, "best_of"),
        (b'{"model":"bytes","messages":[{"role":"user","content":"x","name_":1}]}', 400, "messages[0].name_"),
        (b'{"model":"bytes","messages":[{"role":"user","content":7}]}', 400, "messages[0].content"),
        (b'{"model":"bytes","messages":[{"role":"user","content":"x"}],"max_tokens":"9"}', 400, "max_tokens"),
        (b'{"model":["bytes"],"messages":[{"role":"user","content":"x"}]}', 400, "model"),
        (b" " * (4 << 20) + b" {}", 413, "body"),
    ],
)
async def test_bad_input_touches_no_worker(stack: FrontStack, raw: bytes, status: int, param: str) -> None:
    reply = await stack.client.post("/v1/chat/completions", content=raw)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param)
    assert error["message"].rstrip().endswith(")"), "the fix stands in parentheses at the end"
    assert stack.prefills[0].worker.watched.requests == [] and stack.decodes[0].worker.reserves == []


async def test_a_chunked_body_is_cut_off_at_the_limit(stack: FrontStack) -> None:
    async def long() -> Any:
        for _ in range(100):
            yield b" " * (1 << 16)

    reply = await stack.client.post("/v1/chat/completions", content=long())
    assert reply.status_code == 413


async def test_unknown_paths_and_methods_get_error_objects(stack: FrontStack) -> None:
    assert (await stack.client.get("/v1/nothing")).json()["error"]["code"] == "not_found"
    assert (await stack.client.get("/v1/chat/completions")).status_code == 405
    assert (await stack.client.get("/v1/models/none")).status_code == 404


async def test_keys_are_checked_and_give_each_tenant_its_own_salt(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann {hash_key('key-a').hex()}\nbob {hash_key('key-b').hex()}\n")
    async with front_stack(tmp_path, keys_file=keys) as stack:
        url, body = "/v1/chat/completions", stack.body()
        assert (await stack.client.post(url, json=body)).status_code == 401
        assert (await stack.client.get("/v1/models")).status_code == 401
        for key in ("key-a", "key-b", "key-a"):
            reply = await stack.client.post(url, json=body, headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 200
        ann, bob, again = (request.salt for request in stack.prefills[0].worker.watched.requests)
        assert ann == again != bob and len(ann) == 32
        assert [request.salt for request in stack.decodes[0].worker.reserves] == [ann, bob, ann]


async def test_without_workers_the_gateway_is_not_ready_and_says_why(own_stack: FrontStack) -> None:
    stack = own_stack
    await stack.decodes[0].kill()
    reply = await stack.chat()
    assert reply.status_code == 503 and reply.headers["retry-after"] and "decode" in reply.text
    assert (await stack.client.get("/ready")).status_code == 503
