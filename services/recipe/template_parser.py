"""Answers of models with a chat template: control tokens tell reasoning, content and tool calls apart. Knows no prompt.

Only control tokens structure an answer, never text that looks like one; each token is read by itself, so that
nothing depends on how the output was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from fabric.errors import InvalidArgument
from services.recipe.deltas import Delta, Kind, call_id
from services.recipe.dialect import Ending, TokenLogprobs
from services.recipe.markup import CallBlock, CallMark
from services.recipe.options import ParsingOptions
from services.recipe.reasoning import Marks, ReasoningCount
from services.recipe.token_text import TokenText


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the answers of one model are read with. `calls` is empty where the vocabulary lacks the markup."""

    tokenizer: Tokenizer
    texts: TokenText
    marks: Marks
    reasoning_start: int | None
    calls: dict[int, CallMark]


class TemplateParser:
    """Reads the tokens of one answer. Single use: `push` any number of times, then `finish`."""

    def __init__(self, form: AnswerForm, parsing: ParsingOptions, request_id: str) -> None:
        self._form, self._request_id = form, request_id
        self._calls = form.calls if parsing.tools else {}
        self._kind = Kind.REASONING if parsing.stage.startswith("reasoning") else Kind.CONTENT
        self._reasoning = ReasoningCount(form.marks, parsing)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._waiting: list[dict[str, object]] = []  # log probabilities of a character that is not whole yet
        self._block: CallBlock | None = None
        self._called = 0

    def push(self, token_ids: Sequence[int], logprobs: TokenLogprobs | None = None) -> list[Delta]:
        """Deltas that these tokens complete; text waits until it is whole UTF-8. End-of-sequence tokens say nothing.

        Raises:
            InvalidArgument: as many logprobs as tokens are needed, or none.
        """
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise InvalidArgument(
                f"{len(logprobs)} logprobs for {len(token_ids)} tokens", field="logprobs", fix="send one per token"
            )
        deltas: list[Delta] = []
        for index, token in enumerate(token_ids):
            if token not in self._form.marks.eos:
                self._reasoning.push([token])
                deltas += self._read(
                    token, None if logprobs is None else self._form.texts.entry(token, logprobs[index])
                )
        return deltas

    def finish(self) -> Ending:
        """Ends the input. A half-received character is dropped; a block of calls that did not end is text."""
        deltas = self._leave_block(self._block) if self._block is not None else []
        called = self._called > 0
        return Ending(deltas, called, self._reasoning.total(called))

    def _read(self, token: int, logprob: dict[str, object] | None) -> list[Delta]:
        mark = self._calls.get(token)
        if self._block is not None:
            return self._read_in_block(self._block, token, mark)
        if mark is CallMark.CALLS_BEGIN:
            self._block = CallBlock()
        elif self._kind is Kind.REASONING and token == self._form.marks.reasoning_end:
            self._kind = Kind.CONTENT
        elif self._kind is not Kind.REASONING or token != self._form.reasoning_start:
            return self._say(token, logprob)
        self._forget_half_characters()
        return []

    def _say(self, token: int, logprob: dict[str, object] | None) -> list[Delta]:
        if logprob is not None:
            self._waiting.append(logprob)
        text = self._stream.step(self._form.tokenizer, token)
        if not text:
            return []
        logprobs, self._waiting = tuple(self._waiting), []
        return [Delta(self._kind, text, logprobs)]

    def _read_in_block(self, block: CallBlock, token: int, mark: CallMark | None) -> list[Delta]:
        if mark is None:
            block.text(self._stream.step(self._form.tokenizer, token) or "")
            return []
        self._forget_half_characters()
        call = block.mark(mark)
        deltas = [] if call is None else [self._call(*call)]
        return deltas if block.open else deltas + self._leave_block(block)

    def _call(self, name: str, arguments: str) -> Delta:
        index, self._called = self._called, self._called + 1
        self._kind = Kind.CONTENT
        return Delta(Kind.TOOL_CALL, arguments, (), index, call_id(self._request_id, index), name)

    def _leave_block(self, block: CallBlock) -> list[Delta]:
        self._block = None
        rest = block.rest()
        return [Delta(self._kind, rest)] if rest else []

    def _forget_half_characters(self) -> None:
        self._stream, self._waiting = DecodeStream(skip_special_tokens=False), []
