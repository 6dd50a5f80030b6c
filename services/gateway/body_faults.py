"""What is wrong with a request body, in our words. Never quotes a value: bodies hold prompts, errors reach logs."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fabric import faults
from fabric.errors import InvalidArgument
from services.gateway.chat_body import ChatBody

# Names that pydantic puts into a location for the branch of a union it tried; clients never wrote them.
_BRANCHES = frozenset({"system", "latest_reminder", "user", "assistant", "tool", "str", "NamedChoice"})
_BRANCH_STARTS = ("constrained-", "list[", "literal[")
_ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
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
        raise _explain(error.errors(include_url=False, include_input=False, include_context=True)) from None


def _explain(found: list[ErrorDetails]) -> InvalidArgument:
    fault = _closest(found)
    kind, path, context = fault["type"], _path(fault["loc"]), fault.get("ctx", {})
    if path in _UNSUPPORTED:
        return InvalidArgument("not supported", field=path, fix=_UNSUPPORTED[path])
    if kind == "json_invalid":
        return InvalidArgument("the body is not valid JSON", field="body", fix="send one JSON object in UTF-8")
    if kind.startswith("union_tag"):
        return InvalidArgument("unknown role", field=f"{path}.role", fix=f"use one of {', '.join(_ROLES)}")
    said = faults.words(kind, context)
    if kind == "value_error":
        return InvalidArgument(said.message, field=said.message.split(" ", 1)[0], fix=said.fix)
    if kind == "string_type" and any(_path(other["loc"]) == path for other in found if other["type"] == "list_type"):
        return InvalidArgument("neither text nor a list", field=path, fix="use text or a list")
    return InvalidArgument(said.message, field=path or "body", fix=said.fix)


def _closest(found: list[ErrorDetails]) -> ErrorDetails:
    """The first fault; where a field takes several forms, what is wrong with it in the form that was sent."""
    first = found[0]
    if first["type"] not in ("string_type", "literal_error"):
        return first
    where = _path(first["loc"])
    inside = ((_path(fault["loc"]), fault) for fault in found[1:])
    sent = (fault for path, fault in inside if path.startswith(where) and (path, fault["type"]) not in _not_sent(where))
    return next(sent, first)


def _not_sent(where: str) -> tuple[tuple[str, str], ...]:
    """Faults which only say that a form was not sent at all."""
    return (where, "list_type"), (where, "model_type")


def _path(loc: Sequence[str | int]) -> str:
    """("messages", 2, "user", "content", "str") -> "messages[2].content"."""
    path = ""
    for index, part in enumerate(loc):
        if isinstance(part, int):
            path += f"[{part}]"
        elif not index:
            path = part
        elif part not in _BRANCHES and not part.startswith(_BRANCH_STARTS):
            path += f".{part}"
    return path
