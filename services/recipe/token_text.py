"""Single tokens as OpenAI's log probabilities show them: text and bytes. Knows a vocabulary, no answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer

Logprob = tuple[float, Sequence[tuple[int, float]]]


class TokenText:
    """Entries for tokens of one vocabulary whose ordinary tokens spell bytes."""

    def __init__(self, tokenizer: Tokenizer, control: dict[str, int]) -> None:
        self._tokenizer, self._control = tokenizer, control

    def entry(self, token_id: int, logprob: Logprob) -> dict[str, object]:
        """One token's entry, with its alternatives."""
        own, alternatives = logprob
        return {**self._named(token_id, own), "top_logprobs": [self._named(*each) for each in alternatives]}

    def _named(self, token_id: int, logprob: float) -> dict[str, object]:
        raw = self._bytes(token_id)
        # A token may be part of a character: OpenAI shows its bytes as escapes then.
        return {"token": raw.decode(errors="backslashreplace"), "logprob": logprob, "bytes": list(raw)}

    def _bytes(self, token_id: int) -> bytes:
        spelled = self._tokenizer.id_to_token(token_id) or ""
        if spelled not in self._control and all(character in _byte_of() for character in spelled):
            return bytes(_byte_of()[character] for character in spelled)
        return spelled.encode()


@cache
def _byte_of() -> dict[str, int]:
    """Byte-level vocabularies write printable Latin-1 bytes as themselves and the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
