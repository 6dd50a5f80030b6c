"""Detokenizer: token ids to text, one token at a time. Knows the model's tokenizer; knows no requests and no stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import InvalidParameter

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"  # what a decoder shows for bytes of a character that is not complete yet
_KEPT_TOKENS = 4  # context left of new tokens, for decoders that join tokens differently at the start of a text
_MAX_TOKENS = 32


def open_tokenizer(path: Path) -> Decode:
    """Decoder of a `tokenizer.json`. Raises InvalidParameter naming the file if it is missing or broken."""
    if not path.is_file():
        raise InvalidParameter("model_dir", f"{path} is missing", "put the model's tokenizer.json there")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for every kind of broken file
        raise InvalidParameter("model_dir", f"{path} cannot be read: {error}", "restore tokenizer.json") from error
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False))


class Detokenizer:
    """Text of a growing output. Text appears with the token that completes its last byte."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._seen = 0  # characters of the window's text already returned

    def push(self, token: int) -> str:
        """The text that became certain with `token`; empty while a character is still incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        if len(self._window) > _MAX_TOKENS:  # bytes that never form a character must not hold text back for ever
            certain = text
        new, self._seen = certain[self._seen :], max(self._seen, len(certain))
        if len(certain) == len(text) and len(self._window) > _KEPT_TOKENS:
            self._window = self._window[-_KEPT_TOKENS:]
            self._seen = len(self._decode(self._window))
        return new
