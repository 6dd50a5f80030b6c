"""Stand-ins for the characters of control tokens, so that no text of a client can spell one. Knows no template.

A template mixes its own text, where `<think>` is a control token, with texts of the client, where the same letters are
letters. In those texts every character that occurs in a control token is replaced by a private code point that occurs
nowhere in the request; the template is rendered; control tokens are found, of which the client wrote no character;
then the characters come back. A template sees the replaced texts as opaque: white space, quotes and length are real.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, islice
from typing import Any

from fabric.errors import InvalidArgument

# Words of JSON schemas stay as they are: templates ask for them, and they are no client's choice.
_WORDS = frozenset(
    "type properties required items enum description title default format anyOf oneOf allOf const pattern nullable "
    "additionalProperties minimum maximum minItems maxItems minLength maxLength $ref $defs "
    "string number integer boolean object array null".split()
)


class Mask:
    """One request's stand-ins."""

    def __init__(self, characters: str, present: Collection[str]) -> None:
        """`characters` get stand-ins outside `present`.

        Raises:
            InvalidArgument: the request uses up all private code points.
        """
        stand_ins = list(islice((code for code in _private() if chr(code) not in present), len(characters)))
        if len(stand_ins) < len(characters):
            raise InvalidArgument(
                "uses too many private code points", field="messages", fix="leave out characters from U+F0000"
            )
        self._hide = dict(zip(map(ord, characters), stand_ins, strict=True))
        self._show = {stand_in: character for character, stand_in in self._hide.items()}

    def hide(self, text: str) -> str:
        return text.translate(self._hide)

    def show(self, text: str) -> str:
        return text.translate(self._show)

    def hide_schema(self, tree: Any) -> Any:
        """A JSON value with the strings and keys of its author hidden."""
        if isinstance(tree, str):
            return tree if tree in _WORDS else self.hide(tree)
        if isinstance(tree, list):
            return [self.hide_schema(value) for value in tree]
        if isinstance(tree, dict):
            return {self.hide_schema(key): self.hide_schema(value) for key, value in tree.items()}
        return tree


def _private() -> Iterator[int]:
    return chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
