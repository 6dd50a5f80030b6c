"""OpenAI Chat Completions output: chunks for a client that streams, or one body. Knows deltas, no tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.recipe.deltas import Delta, Kind

_TEXT_FIELD = {Kind.REASONING: "reasoning_content", Kind.CONTENT: "content"}


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk of one answer repeats. `created` in unix seconds."""

    id: str
    model: str
    created: int
    thinking: bool


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one answer; `cached` of the prompt, `reasoning` of the completion."""

    prompt: int
    cached: int
    completion: int
    reasoning: int

    def wire(self, thinking: bool) -> dict[str, Any]:
        """The usage object, with DeepSeek's own cache counters beside OpenAI's."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "prompt_cache_hit_tokens": self.cached,
            "prompt_cache_miss_tokens": self.prompt - self.cached,
        }
        if thinking:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage


class ChunkWriter:
    """Writes `chat.completion.chunk` objects, the first of which carries the role."""

    def __init__(self, heading: Heading, include_usage: bool) -> None:
        self._heading = heading
        self._include_usage = include_usage
        self._opened = False

    def write(self, deltas: Iterable[Delta]) -> list[bytes]:
        """One chunk per delta."""
        opening = [] if self._opened else [self._chunk({"role": "assistant", **self._text(Kind.CONTENT, "")})]
        chunks = [self._chunk(self._delta(delta), _logprobs(delta)) for delta in deltas]
        if not chunks:
            return []
        self._opened = True
        return opening + chunks

    def finish(self, reason: str, usage: TokenUsage) -> list[bytes]:
        """The chunk that names the finish reason and, where asked for, the one with the usage and no choice."""
        opening = [] if self._opened else [self._chunk({"role": "assistant", **self._text(Kind.CONTENT, "")})]
        last = [self._chunk(self._text(Kind.CONTENT, ""), reason=reason)]
        if self._include_usage:
            last.append(self._dump([], usage.wire(self._heading.thinking)))
        return opening + last

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if delta.kind is Kind.TOOL_CALL:
            return {"tool_calls": [_call(delta)]}
        return self._text(delta.kind, delta.text)

    def _text(self, kind: Kind, text: str) -> dict[str, Any]:
        if not self._heading.thinking:
            return {"content": text}
        return {"content": None, "reasoning_content": None, _TEXT_FIELD[kind]: text}

    def _chunk(self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None) -> bytes:
        return self._dump([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}], None)

    def _dump(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        chunk: dict[str, Any] = {
            "id": self._heading.id,
            "object": "chat.completion.chunk",
            "created": self._heading.created,
            "model": self._heading.model,
            "system_fingerprint": None,
            "choices": choices,
        }
        if self._include_usage:
            chunk["usage"] = usage
        return _json(chunk)


@dataclass(slots=True)
class BodyWriter:
    """Gathers a whole answer and writes it as one `chat.completion` object."""

    heading: Heading
    _texts: dict[Kind, list[str]] = field(default_factory=lambda: {Kind.REASONING: [], Kind.CONTENT: []})
    _logprobs: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def write(self, deltas: Iterable[Delta]) -> list[bytes]:
        """Nothing yet: the body comes at the end."""
        for delta in deltas:
            if delta.kind is Kind.TOOL_CALL:
                self._add_call(delta)
            else:
                self._texts[delta.kind].append(delta.text)
            for name, entries in (_logprobs(delta) or {}).items():
                self._logprobs.setdefault(name, []).extend(entries)
        return []

    def finish(self, reason: str, usage: TokenUsage) -> list[bytes]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts[Kind.CONTENT])}
        if self.heading.thinking:
            message["reasoning_content"] = "".join(self._texts[Kind.REASONING])
        if self._calls:
            message["tool_calls"] = list(self._calls.values())
        choice = {"index": 0, "message": message, "logprobs": self._logprobs or None, "finish_reason": reason}
        body = {
            "id": self.heading.id,
            "object": "chat.completion",
            "created": self.heading.created,
            "model": self.heading.model,
            "choices": [choice],
            "usage": usage.wire(self.heading.thinking),
            "system_fingerprint": None,
        }
        return [_json(body)]

    def _add_call(self, delta: Delta) -> None:
        known = self._calls.setdefault(delta.call_index, _call(delta) | {"function": {"name": "", "arguments": ""}})
        known["function"]["name"] += delta.name
        known["function"]["arguments"] += delta.text


def _call(delta: Delta) -> dict[str, Any]:
    if not delta.call_id:
        return {"index": delta.call_index, "function": {"arguments": delta.text}}
    function = {"name": delta.name, "arguments": delta.text}
    return {"index": delta.call_index, "id": delta.call_id, "type": "function", "function": function}


def _logprobs(delta: Delta) -> dict[str, Any] | None:
    if not delta.logprobs:
        return None
    return {_TEXT_FIELD.get(delta.kind, "content"): list(delta.logprobs)}


def _json(tree: dict[str, Any]) -> bytes:
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
