"""Neutral output of a parser: what a model said, piece by piece. Knows no protocol and no tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from blake3 import blake3

Logprobs = tuple[dict[str, object], ...]


class Kind(StrEnum):
    """What a piece of text belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of output.

    `text` is reasoning, content or a piece of a call's arguments (JSON). A call's `call_id` and `name` come with its
    first piece alone. `logprobs` are entries in OpenAI's form, one per token of the piece.
    """

    kind: Kind
    text: str
    logprobs: Logprobs = ()
    call_index: int = 0
    call_id: str = ""
    name: str = ""


def call_id(request_id: str, index: int) -> str:
    """The id of a request's tool call: it follows from the request, so that a retried Parse gives the same ones."""
    return f"call_{index:02d}_{blake3(f'{request_id}/{index}'.encode()).hexdigest()[:24]}"


def coalesce(deltas: Iterable[Delta]) -> list[Delta]:
    """The same output in as few pieces as possible: neighbours of one kind (and one call) become one."""
    merged: list[Delta] = []
    for delta in deltas:
        if merged and _continues(merged[-1], delta):
            last = merged[-1]
            merged[-1] = replace(last, text=last.text + delta.text, logprobs=last.logprobs + delta.logprobs)
        else:
            merged.append(delta)
    return merged


def _continues(last: Delta, delta: Delta) -> bool:
    return last.kind is delta.kind and last.call_index == delta.call_index and not delta.call_id
