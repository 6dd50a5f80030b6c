"""What a dialect is: the seam between the service and the text form that one model was trained on. Knows no form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.recipe.deltas import Delta
from services.recipe.options import ParsingOptions
from services.recipe.text import TextParser

TokenLogprobs = Sequence[tuple[float, Sequence[tuple[int, float]]]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt ready for the engine, and what Parse must know of it."""

    token_ids: list[int]
    parsing_options: bytes
    constraint_kind: str
    constraint: str
    default_max_tokens: int
    thinking: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """How the parser ended: its last deltas, whether the model called tools, and how long it reasoned."""

    deltas: list[Delta]
    called_tools: bool
    reasoning_tokens: int


class ChatParser(Protocol):
    """Reads the tokens of one answer: any number of `push`, then one `finish`."""

    def push(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> list[Delta]: ...

    def finish(self) -> Ending: ...


class Process(Protocol):
    """A child process that works for a dialect until it is closed."""

    def close(self) -> None: ...


class Dialect(Protocol):
    """One model's text form with its tokenizer. Holds no request; safe to use from several threads.

    `silent` are the spellings of control tokens that its parsers may show as no text. `encoding` is what Info tells.
    A dialect that does not `chat` refuses `render_chat`. Whoever opens one closes its `processes`.
    """

    model: str
    encoding: str
    vocab_size: int
    silent: tuple[str, ...]
    chats: bool
    processes: tuple[Process, ...]

    def render_chat(self, body: bytes) -> Rendered: ...

    def render_text(self, text: str) -> Rendered: ...

    def chat_parser(self, parsing: ParsingOptions, request_id: str) -> ChatParser: ...

    def text_parser(self) -> TextParser: ...
