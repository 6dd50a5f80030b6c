"""Deterministic checkers: does an assistant message answer a problem? Knows no model."""

from __future__ import annotations

import json
from typing import Any

from models.nano.data import structured, toolcalls
from models.nano.data.problem import Problem


def _calls_match(problem: Problem, message: dict[str, Any]) -> bool:
    made = message.get("tool_calls") or []
    if len(made) != len(problem.calls):
        return False
    for call, wanted in zip(made, problem.calls, strict=True):
        function = call.get("function", {})
        try:
            arguments = json.loads(function.get("arguments", ""))
        except ValueError:
            return False
        if function.get("name") != wanted.name or not _same(arguments, wanted.arguments):
            return False
    return True


def _same(got: Any, wanted: Any) -> bool:
    """JSON equality that, unlike Python's, tells true from 1."""
    return json.dumps(got, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def _json_matches(problem: Problem, content: str) -> bool:
    try:
        return _same(json.loads(content), json.loads(problem.answer))
    except ValueError:
        return False


def correct(problem: Problem, message: dict[str, Any]) -> bool:
    """Whether an OpenAI assistant message (content, tool_calls) is exactly what the problem asks for."""
    if problem.kind == toolcalls.CALL_KIND:
        return _calls_match(problem, message)
    content = (message.get("content") or "").strip()
    if message.get("tool_calls"):
        return False
    if problem.kind == structured.KIND:
        return _json_matches(problem, content)
    return content == problem.answer
