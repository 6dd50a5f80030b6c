"""From a client's request to a job: the one place where both surfaces meet. Knows their forms, no service behind."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from engine.sampling.params import MAX_NEW_TOKENS
from fabric import wire
from fabric.errors import InvalidArgument
from fabric.retention import Keeping, RetentionClass
from protos.deepinfer.v1 import gateway_pb2, recipe_pb2
from services.gateway import sampling
from services.gateway.body_faults import read_chat
from services.gateway.chat_body import MAX_MESSAGES, MAX_TOOLS
from services.gateway.job import Job
from services.gateway.tenants import Tenant

_MAX_JSON_CHARS = 1 << 20
_SAMPLING = "sampling"  # where our own messages nest it
# Fields of a body that our own messages call otherwise.
_RENAMED = (
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.parameters_json"),
    (re.compile(r"\.function\.arguments"), ".arguments_json"),
    (re.compile(r"\.function\b"), ""),
    (re.compile(r"\.reasoning_content$"), ".reasoning"),
    (re.compile(r"^(tool_choice|thinking)\..*"), r"\1"),
    (re.compile(r"^top_logprobs$"), "logprobs"),
    (re.compile(r"^(max_tokens|logprobs|temperature|top_p|stop)$"), rf"{_SAMPLING}.\1"),
)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the gateway adds to a request: its id, whose it is, and when it came (unix seconds)."""

    request_id: str
    tenant: Tenant
    created: int

    def keeping(self, asked: RetentionClass | None, otherwise: RetentionClass) -> Keeping:
        """What was asked for; else what the tenant's requests belong to; else what requests of this form do."""
        return Keeping(self.tenant.owner, asked or self.tenant.retention or otherwise)


def chat_from_body(body: bytes, stamp: Stamp) -> Job:
    """A job for an OpenAI chat completion body.

    Raises:
        InvalidArgument: naming the field.
    """
    chat = read_chat(body)
    return Job(
        request_id=stamp.request_id,
        model=chat.model,
        salt=stamp.tenant.salt,
        dialect=recipe_pb2.DIALECT_OPENAI_CHAT,
        sampling=chat.sampling(1),
        max_tokens=chat.output_limit,
        prompt_field="messages",
        render=recipe_pb2.RenderRequest(dialect=recipe_pb2.DIALECT_OPENAI_CHAT, body=body),
        stream=bool(chat.stream),
        include_usage=chat.include_usage,
        created=stamp.created,
        keeping=stamp.keeping(chat.retention_class, _retention_of_chat(bool(chat.tools))),
        regions=stamp.tenant.regions,
        named=_newer if chat.max_tokens is None and chat.max_completion_tokens is not None else str,
    )


def chat_from_message(request: gateway_pb2.ChatRequest, stamp: Stamp) -> Job:
    """A job for a gRPC chat; it passes through the same checks as a body.

    Raises:
        InvalidArgument: naming the field.
    """
    _refuse_many(request)
    asked = request.sampling
    params = sampling.checked(sampling.unpack(asked, MAX_NEW_TOKENS), 1 << 31, _SAMPLING)
    try:
        job = chat_from_body(json.dumps(_body(request)).encode(), stamp)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=_in_message(error.field), fix=error.fix) from error
    return Job(
        request_id=job.request_id,
        model=job.model,
        salt=job.salt,
        dialect=job.dialect,
        sampling=params,
        max_tokens=asked.max_tokens if asked.HasField("max_tokens") else None,
        prompt_field="messages",
        render=job.render,
        use_cache=request.use_cache if request.HasField("use_cache") else True,
        created=stamp.created,
        sampling_field=_SAMPLING,
        keeping=stamp.keeping(_asked(request), _retention_of_chat(bool(request.tools))),
        regions=job.regions,
        named=_in_message,
    )


def generate_from_message(request: gateway_pb2.GatewayServiceGenerateRequest, stamp: Stamp) -> Job:
    """A job for a continuation of text or of token ids.

    Raises:
        InvalidArgument: naming the field.
    """
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("there is no prompt", field="prompt", fix="send text or token_ids")
    if not request.model:
        raise InvalidArgument("missing", field="model", fix="name a model; ListModels tells which")
    asked = request.sampling
    text = recipe_pb2.RenderRequest(dialect=recipe_pb2.DIALECT_TEXT, text=request.text)
    return Job(
        request_id=stamp.request_id,
        model=request.model,
        salt=stamp.tenant.salt,
        dialect=recipe_pb2.DIALECT_TEXT,
        sampling=sampling.checked(sampling.unpack(asked, MAX_NEW_TOKENS), 1 << 31, _SAMPLING),
        max_tokens=asked.max_tokens if asked.HasField("max_tokens") else None,
        prompt_field="token_ids" if kind == "token_ids" else "text",
        render=text if kind == "text" else None,
        token_ids=tuple(request.token_ids.ids),
        use_cache=request.use_cache if request.HasField("use_cache") else True,
        created=stamp.created,
        sampling_field=_SAMPLING,
        keeping=stamp.keeping(_asked(request), RetentionClass.DEFAULT),
        regions=stamp.tenant.regions,
    )


def prefetch_from_message(request: gateway_pb2.GatewayServicePrefetchRequest, stamp: Stamp) -> Job:
    """The job of the request that will come. Raises InvalidArgument where it is missing, or is none."""
    match request.WhichOneof("request"):
        case "chat":
            return chat_from_message(request.chat, stamp)
        case "generate":
            return generate_from_message(request.generate, stamp)
        case _:
            raise InvalidArgument("no request is named", field="request", fix="set chat or generate")


def _retention_of_chat(tools: bool) -> RetentionClass:
    """With tools it is an agent's."""
    return RetentionClass.AGENT if tools else RetentionClass.CHAT


def _asked(request: gateway_pb2.ChatRequest | gateway_pb2.GatewayServiceGenerateRequest) -> RetentionClass | None:
    try:
        return wire.unpack_retention(request.retention)
    except ValueError as error:
        fix = f"use one of {', '.join(RetentionClass)}"
        raise InvalidArgument(str(error), field="retention", fix=fix) from error


def _refuse_many(request: gateway_pb2.ChatRequest) -> None:
    for field, count, most in (
        ("messages", len(request.messages), MAX_MESSAGES),
        ("tools", len(request.tools), MAX_TOOLS),
    ):
        if count > most:
            raise InvalidArgument(f"{count} entries", field=field, fix=f"send at most {most}")


def _body(request: gateway_pb2.ChatRequest) -> dict[str, Any]:
    """The OpenAI body that says the same; sampling stays apart, it needs no rendering."""
    body: dict[str, Any] = {"model": request.model, "messages": [_message(item) for item in request.messages]}
    if request.tools:
        body["tools"] = [_tool(tool, index) for index, tool in enumerate(request.tools)]
    if request.tool_choice:
        body["tool_choice"] = _choice(request.tool_choice)
    if request.HasField("thinking"):
        body["thinking"] = {"type": "enabled" if request.thinking else "disabled"}
    if request.sampling.HasField("max_tokens"):
        body["max_tokens"] = request.sampling.max_tokens
    if request.sampling.HasField("logprobs"):
        body |= {"logprobs": True, "top_logprobs": request.sampling.logprobs}
    return body


def _newer(field: str) -> str:
    """What a client calls the limit of its output that did not use the older name."""
    return "max_completion_tokens" if field == "max_tokens" else field


def _in_message(field: str) -> str:
    """What a gRPC client calls the `field` of a body."""
    for pattern, name in _RENAMED:
        field = pattern.sub(name, field)
    return field


def _message(message: gateway_pb2.ChatMessage) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


def _call(call: gateway_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def _tool(tool: gateway_pb2.Tool, index: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = _schema(tool.parameters_json, index)
    return {"type": "function", "function": function}


def _schema(text: str, index: int) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant) if len(text) <= _MAX_JSON_CHARS else None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            "not JSON", field=f"tools[{index}].parameters_json", fix="send a JSON schema object"
        ) from error


def _refuse_constant(name: str) -> None:
    """Python reads NaN and Infinity; JSON has neither."""
    raise ValueError(name)


def _choice(choice: str) -> Any:
    if choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}
