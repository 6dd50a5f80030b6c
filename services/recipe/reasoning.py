"""How many tokens of an answer were reasoning. Counts tokens by the marks between them; knows no text.

The parser's library counts pieces of text, which differ from tokens where a character spans several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.recipe.options import ParsingOptions


@dataclass(frozen=True, slots=True)
class Marks:
    """Control tokens that structure an answer; None for those that a vocabulary lacks."""

    eos: frozenset[int]
    reasoning_end: int | None
    call: int | None


class ReasoningCount:
    """Counts up to the mark that closes reasoning; without one, up to the first tool call, if there was any."""

    def __init__(self, marks: Marks, parsing: ParsingOptions) -> None:
        self._marks = marks
        self._open = parsing.stage.startswith("reasoning") and not parsing.starts_in_tools
        self._seen = 0
        self._before_call: int | None = None

    def push(self, token_ids: Sequence[int]) -> None:
        """The next tokens, end-of-sequence tokens left out."""
        for token in token_ids:
            if not self._open:
                return
            if token == self._marks.reasoning_end:
                self._open, self._before_call = False, None
                return
            if token == self._marks.call and self._before_call is None:
                self._before_call = self._seen
            self._seen += 1

    def total(self, called_tools: bool) -> int:
        """Reasoning tokens of the whole answer."""
        if called_tools and self._before_call is not None:
            return self._before_call
        return self._seen
