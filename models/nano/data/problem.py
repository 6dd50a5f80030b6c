"""One generated problem: what is asked, what must be answered, and which split it belongs to. Knows no tokenizer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
SPELL_OPEN, SPELL_CLOSE = "\ue000", "\ue001"
HELD_OUT_SHARE = 16


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: its name and its arguments in schema order."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """A conversation up to the answer, and the answer. `key` names the problem for the held-out split.

    `reasoning` and `content` may mark spans that training writes letter by letter (`spelled`)."""

    kind: str
    key: str
    messages: tuple[Message, ...]
    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False
    effort: str | None = None
    json_mode: bool = False
    split: str = ""

    @property
    def split_key(self) -> str:
        """What the held-out hash is taken of; a problem inside another keeps its own."""
        return self.split or f"{self.kind}:{self.key}"

    @property
    def answer(self) -> str:
        """`content` as a client sees it."""
        return self.content.replace(SPELL_OPEN, "").replace(SPELL_CLOSE, "")

    def request(self, model: str = "nano") -> dict[str, Any]:
        """The OpenAI chat-completions body that asks this problem."""
        body: dict[str, Any] = {
            "model": model,
            "messages": list(self.messages),
            "thinking": {"type": "enabled" if self.thinking else "disabled"},
        }
        if self.thinking and self.effort:
            body["reasoning_effort"] = self.effort
        if self.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in self.tools]
        if self.json_mode:
            body["response_format"] = {"type": "json_object"}
        return body


Generator = Callable[[random.Random], Problem]


def spelled(text: str) -> str:
    """Mark `text` to be tokenized one character at a time in a training target."""
    return f"{SPELL_OPEN}{text}{SPELL_CLOSE}"


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def held_out(key: str) -> bool:
    """Whether a problem is kept from training: one in `HELD_OUT_SHARE` keys, by a hash that does not change."""
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % HELD_OUT_SHARE == 0


def draw(generator: Generator, rng: random.Random, evaluation: bool) -> Problem:
    """The generator's next problem of the wanted split."""
    while True:
        problem = generator(rng)
        if held_out(problem.split_key) == evaluation:
            return problem
