"""Plain text from tokens, whole characters only. Knows no chat format: control tokens appear as they are spelled."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.recipe.deltas import Delta, Kind


class TextParser:
    """Decodes one continuation. Text waits until it is whole UTF-8; half a character at the end is dropped."""

    def __init__(self, tokenizer: Tokenizer, eos: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._eos = eos

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Text that these tokens complete. End-of-sequence tokens say nothing."""
        pieces = [self._stream.step(self._tokenizer, token) for token in token_ids if token not in self._eos]
        text = "".join(piece for piece in pieces if piece)
        return [Delta(Kind.CONTENT, text)] if text else []
