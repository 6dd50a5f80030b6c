"""Why a chat request was refused, in our words: which field and what to do. Reads only requests that already failed."""

from __future__ import annotations

import json
import re
from typing import Any

from fabric.errors import InvalidArgument

_ROLES = ("system", "user", "assistant", "tool", "latest_reminder")

# What deepseek-recipe says, to (field, fix). Its messages are about form; those that could quote a user's text are
# replaced, see `_own_words`.
_TABLE: tuple[tuple[str, str, str], ...] = (
    (r"Empty input messages", "messages", "send at least one message"),
    (r"tool_choice", "tool_choice", "disable thinking ({'thinking': {'type': 'disabled'}}) or use 'auto'"),
    (r"expected one of `none`, `auto`, `required`", "tool_choice", "use 'none', 'auto', 'required' or a function"),
    (r"no function named", "tool_choice", "name one of the functions in tools"),
    (r"insufficient tool messages", "messages", "answer every tool call with a tool message"),
    (r"names must be unique", "tools", "give each function a name of its own"),
    (r"recursion limit", "body", "nest less deeply"),
    (r"response_format", "response_format", "say in the prompt that JSON is wanted, or use 'text'"),
    (r"temperature", "temperature", "use a number from 0 to 2"),
    (r"top_p", "top_p", "use a number from 0 to 1"),
    (r"top_logprobs", "top_logprobs", "use a whole number from 0 to 20, with logprobs: true"),
    (r"Stop string", "stop", "send at most 16 strings"),
    (r"Invalid n value", "n", "use n=1"),
    (r"max_tokens", "max_tokens", "ask for fewer tokens"),
    (r"`adaptive`, `enabled`, `disabled`", "thinking.type", "use 'enabled' or 'disabled'"),
    (r"`minimal`, `low`", "reasoning_effort", "use 'low', 'medium', 'high' or 'max'"),
    (r"tools?\b|function", "tools", "send tools as {'type': 'function', 'function': {'name', 'parameters'}}"),
)
_INDEXED = re.compile(r"'((?:tools|messages)\[\d+\][\w.\[\]]*)'")
_ABOUT_ANSWERS = re.compile(r"role 'tool'|tool_call")
_SCHEMA_OF = re.compile(r"Invalid schema for function '([^']*)'")


def explain(said: str, body: bytes) -> InvalidArgument:
    """The error for a body that deepseek-recipe refused with the words `said`.

    Never quotes the request: messages may end in logs.
    """
    tree = _tree(body)
    if tree is None:
        return InvalidArgument("the body is not a JSON object", field="body", fix="send one JSON object in UTF-8")
    return _message_fault(tree) or _answer_fault(said, tree["messages"]) or _schema_fault(said, tree) or _known(said)


def _tree(body: bytes) -> dict[str, Any] | None:
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


def _message_fault(tree: dict[str, Any]) -> InvalidArgument | None:
    messages = tree.get("messages")
    if not isinstance(messages, list) or not messages:
        return InvalidArgument("there are no messages", field="messages", fix="send at least one message")
    for index, message in enumerate(messages):
        fault = _one_message(message)
        if fault:
            field, text, fix = fault
            return InvalidArgument(text, field=f"messages[{index}]{field}", fix=fix)
    return None


def _one_message(message: Any) -> tuple[str, str, str] | None:
    if not isinstance(message, dict):
        return "", "not an object", "send {'role': ..., 'content': ...}"
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        return ".role", "unknown role", f"use one of {', '.join(_ROLES)}"
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        return ".tool_call_id", "a tool message needs the id of the call it answers", "copy it from the tool call"
    may_be_empty = role == "assistant" and message.get("tool_calls")
    if not isinstance(content, str | list) and not (content is None and may_be_empty):
        return ".content", "neither text nor a list of parts", "send a string"
    return None


def _answer_fault(said: str, messages: list[dict[str, Any]]) -> InvalidArgument | None:
    """Which message breaks the rule that every tool call is answered once, right after it was made."""
    if not _ABOUT_ANSWERS.search(said):
        return None
    waiting: list[Any] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                fix = "send it once, right after the assistant message with the call's id"
                return InvalidArgument("answers no tool call", field=f"messages[{index}].tool_call_id", fix=fix)
            waiting.remove(message["tool_call_id"])
        elif waiting:
            fix = "answer every tool call with a tool message"
            return InvalidArgument("a tool call before it has no answer", field=f"messages[{index}]", fix=fix)
        else:
            calls = message.get("tool_calls") or []
            waiting = [call.get("id") for call in calls if isinstance(call, dict)]
            if len(set(waiting)) < len(waiting):
                fix = "give each call an id of its own"
                return InvalidArgument("two calls have one id", field=f"messages[{index}].tool_calls", fix=fix)
    return None


def _schema_fault(said: str, tree: dict[str, Any]) -> InvalidArgument | None:
    match = _SCHEMA_OF.search(said)
    tools = tree.get("tools")
    if not match or not isinstance(tools, list):
        return None
    names = [tool.get("function", {}).get("name") if isinstance(tool, dict) else None for tool in tools]
    where = f"tools[{names.index(match[1])}].function.parameters" if match[1] in names else "tools"
    return InvalidArgument("not a JSON schema", field=where, fix="send a JSON schema object")


def _known(said: str) -> InvalidArgument:
    if indexed := _INDEXED.search(said):
        return InvalidArgument("the value has a wrong form", field=indexed[1], fix=_pattern_fix(said))
    for pattern, field, fix in _TABLE:
        if re.search(pattern, said):
            return InvalidArgument("the value is not accepted", field=field, fix=fix)
    missing = re.search(r"missing field `(\w+)`", said)
    field = missing[1] if missing else "body"
    return InvalidArgument("missing" if missing else "not a chat completion request", field=field, fix="see the API")


def _pattern_fix(said: str) -> str:
    pattern = re.search(r"pattern '([^']+)'", said)
    return f"use a name that matches {pattern[1]}" if pattern else "see the OpenAI chat completion API"
