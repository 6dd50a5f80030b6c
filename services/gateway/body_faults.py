"""What is wrong with a request body, in our words. Never quotes a value: bodies hold prompts, errors reach logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fabric.errors import InvalidArgument
from services.gateway.chat_body import ChatBody

# Names that pydantic puts into a location for the branch of a union it tried; clients never wrote them.
_BRANCHES = frozenset({"system", "latest_reminder", "user", "assistant", "tool", "str", "NamedChoice"})
_BRANCH_STARTS = ("constrained-", "list[", "literal[")
_UNSUPPORTED = {
    "n": "one answer per request; send n requests",
    "response_format.type": "only 'text' is served by this deployment",
    "parallel_tool_calls": "the model decides how many tools it calls; leave it out",
}


def read_chat(body: bytes) -> ChatBody:
    """The request behind a body.

    Raises:
        InvalidArgument: the body is not JSON, nests too deeply, or a field is unknown, missing, mistyped or out of
            range; names the field as a path such as `messages[2].content`.
    """
    try:
        return ChatBody.model_validate_json(body)
    except ValidationError as error:
        fault = _closest(error.errors(include_url=False, include_input=False, include_context=True))
        raise _explain(fault["type"], fault["loc"], fault["msg"], fault.get("ctx", {})) from None


def _closest(faults: list[ErrorDetails]) -> ErrorDetails:
    """The first fault; where a list was tried as a string first, what is wrong with it as a list."""
    first = faults[0]
    if first["type"] != "string_type":
        return first
    where = _path(first["loc"])
    inside = (fault for fault in faults[1:] if _path(fault["loc"]).startswith(where) and fault["type"] != "list_type")
    return next(inside, first)


def _explain(kind: str, loc: Sequence[str | int], said: str, context: dict[str, Any]) -> InvalidArgument:
    path = _path(loc)
    if path in _UNSUPPORTED:
        return InvalidArgument("not supported", field=path, fix=_UNSUPPORTED[path])
    match kind:
        case "json_invalid":
            return InvalidArgument("the body is not valid JSON", field="body", fix="send one JSON object in UTF-8")
        case "extra_forbidden":
            return InvalidArgument("unknown field", field=path, fix="remove it, or check its spelling")
        case "missing":
            return InvalidArgument("missing", field=path, fix="send it")
        case "union_tag_invalid" | "union_tag_not_found":
            roles = "system, user, assistant, tool, latest_reminder"
            return InvalidArgument("unknown role", field=f"{path}.role", fix=f"use one of {roles}")
        case "value_error":
            text = str(context.get("error", said))
            return InvalidArgument(text, field=text.split(" ", 1)[0], fix="make the fields agree")
        case "literal_error":
            return InvalidArgument("not an accepted value", field=path, fix=f"use {context.get('expected', '')}")
    return InvalidArgument(said, field=path or "body", fix="see /docs for the accepted fields")


def _path(loc: Sequence[str | int]) -> str:
    """("messages", 2, "user", "content", "str") -> "messages[2].content"."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES and not part.startswith(_BRANCH_STARTS):
            path += f".{part}" if path else part
    return path
