"""Intake: what a request's KV is kept for, on every surface."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fabric.errors import InvalidArgument
from fabric.retention import Keeping, RetentionClass
from protos.deepinfer.v1 import common_pb2, gateway_pb2
from services.gateway import intake
from services.gateway.intake import Stamp
from services.gateway.job import Job
from services.gateway.tenants import Tenant

OWNER = b"o" * 16
CHAT, AGENT, DEFAULT = RetentionClass.CHAT, RetentionClass.AGENT, RetentionClass.DEFAULT
TOOL = {"type": "function", "function": {"name": "f"}}


def body(retention: RetentionClass | None, own: RetentionClass | None, **fields: Any) -> Job:
    asked = {} if retention is None else {"retention": retention.value}
    text = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]} | asked | fields)
    return intake.chat_from_body(text.encode(), Stamp("id", Tenant("ann", b"salt", OWNER, own), 1))


def code(retention: RetentionClass | None) -> common_pb2.RetentionClass:
    return common_pb2.RetentionClass.Value(f"RETENTION_CLASS_{(retention or 'unspecified').upper()}")


def chat(retention: RetentionClass | None, own: RetentionClass | None, **fields: Any) -> Job:
    said = [gateway_pb2.ChatMessage(role="user", content="x")]
    request = gateway_pb2.ChatRequest(model="m", messages=said, retention=code(retention), **fields)
    return intake.chat_from_message(request, Stamp("id", Tenant("ann", b"salt", OWNER, own), 1))


def generate(retention: RetentionClass | None, own: RetentionClass | None) -> Job:
    request = gateway_pb2.GatewayServiceGenerateRequest(model="m", text="x", retention=code(retention))
    return intake.generate_from_message(request, Stamp("id", Tenant("ann", b"salt", OWNER, own), 1))


@pytest.mark.parametrize(("form", "otherwise"), [(body, CHAT), (chat, CHAT), (generate, DEFAULT)])
def test_what_is_asked_for_counts_then_the_tenants_then_the_forms(form: Any, otherwise: RetentionClass) -> None:
    assert form(AGENT, DEFAULT).keeping == Keeping(OWNER, AGENT)
    assert form(None, AGENT).keeping == Keeping(OWNER, AGENT)
    assert form(None, None).keeping == Keeping(OWNER, otherwise)


def test_a_chat_with_tools_is_an_agents() -> None:
    tool = gateway_pb2.Tool(name="f")
    assert body(None, None, tools=[TOOL]).keeping.retention is AGENT
    assert chat(None, None, tools=[tool]).keeping.retention is AGENT
    assert chat(CHAT, None, tools=[tool]).keeping.retention is CHAT


@pytest.mark.parametrize(
    "request_",
    [
        gateway_pb2.GatewayServiceGenerateRequest(model="m", text="x", retention=9),  # type: ignore[arg-type]
        gateway_pb2.ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], retention=9),  # type: ignore
    ],
)
def test_a_class_that_does_not_exist_is_refused(request_: Any) -> None:
    take = intake.generate_from_message if hasattr(request_, "text") else intake.chat_from_message
    with pytest.raises(InvalidArgument) as caught:
        take(request_, Stamp("id", Tenant("ann", b"salt"), 1))  # type: ignore[operator]
    assert caught.value.field == "retention" and "agent" in caught.value.fix
