"""One answer being parsed: tokens in, neutral deltas and the dialect's own bytes out. Knows no gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.recipe.chat_wire import BodyWriter, ChunkWriter, TokenUsage
from services.recipe.deltas import Delta, coalesce
from services.recipe.dialect import ChatParser, TokenLogprobs
from services.recipe.text import TextParser
from services.recipe.trim import StopTrim


@dataclass(frozen=True, slots=True)
class Step:
    """What one push lets out: deltas in order, and what the dialect's client is to receive, byte for byte."""

    deltas: Sequence[Delta]
    wire: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The last step; `reason` is "stop", "length" or "tool_calls"."""

    step: Step
    reason: str
    reasoning_tokens: int


class Session(Protocol):
    """Parses one answer: any number of `push`, then one `finish`."""

    def push(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> Step: ...

    def finish(self, reason: str, stop: str, usage: TokenUsage) -> End: ...


class ChatSession:
    """An answer in OpenAI's chat form."""

    def __init__(self, parser: ChatParser, trim: StopTrim, writer: ChunkWriter | BodyWriter) -> None:
        self._parser = parser
        self._trim = trim
        self._writer = writer

    def push(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> Step:
        """Raises InvalidArgument where logprobs and tokens differ in number."""
        deltas = coalesce(self._trim.push(self._parser.push(token_ids, logprobs)))
        return Step(deltas, self._writer.write(deltas))

    def finish(self, reason: str, stop: str, usage: TokenUsage) -> End:
        """`usage.reasoning` is ours to count: what the caller says of it is not used."""
        ending = self._parser.finish()
        deltas = coalesce(self._trim.finish(ending.deltas, stop))
        reason = "tool_calls" if ending.called_tools and reason == "stop" and not stop else reason
        counted = TokenUsage(usage.prompt, usage.cached, usage.completion, ending.reasoning_tokens)
        wire = [*self._writer.write(deltas), *self._writer.finish(reason, counted)]
        return End(Step(deltas, wire), reason, ending.reasoning_tokens)


class TextSession:
    """A continuation of plain text; it has no wire form of its own."""

    def __init__(self, parser: TextParser, trim: StopTrim) -> None:
        self._parser = parser
        self._trim = trim

    def push(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> Step:
        """Log probabilities name tokens, not text: the caller has them already."""
        return Step(self._trim.push(self._parser.push(token_ids)))

    def finish(self, reason: str, stop: str, usage: TokenUsage) -> End:
        return End(Step(coalesce(self._trim.finish((), stop))), reason, 0)
