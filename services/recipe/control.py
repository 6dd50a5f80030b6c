"""Control tokens of a tokenizer: how they are spelled, and where a text holds them. Knows no conversation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The added vocabulary by spelling. `characters` are all that occur in one, in the order of their code points."""

    ids: dict[str, int]
    values: frozenset[int]
    characters: str
    _pattern: re.Pattern[str]

    @classmethod
    def read(cls, tokenizer: Tokenizer) -> ControlTokens:
        """Of a tokenizer with its added vocabulary; an empty spelling is none."""
        added = tokenizer.get_added_tokens_decoder()
        named = {number: token for number, token in added.items() if token.content}
        ids = {token.content: number for number, token in named.items()}
        characters = "".join(sorted(set("".join(ids))))
        return cls(ids, frozenset(ids.values()), characters, _pattern(list(named.values())))

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """`text` in order: pieces without control tokens (id None), and the control tokens between them.

        The leftmost, longest spelling counts, as in a tokenizer.
        """
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                yield text[end : match.start()], None
            yield match[0], self.ids[match[0].strip() if match[0] not in self.ids else match[0]]
            end = match.end()
        if end < len(text):
            yield text[end:], None


def _pattern(tokens: list[Any]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    forms = [
        (r"\s*" if token.lstrip else "") + re.escape(token.content) + (r"\s*" if token.rstrip else "")
        for token in longest_first
    ]
    return re.compile("|".join(forms) or r"(?!)")
