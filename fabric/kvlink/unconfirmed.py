"""Unconfirmed: chunks that were announced and that their receiver did not say it took, in order. Sends nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from fabric.kvlink.credit import Run
from fabric.kvlink.pieces import Pieces


@dataclass(slots=True, eq=False)
class Announced:
    """One chunk. `lent`: its bytes are not in the landing but where they are; `run` is empty then where it needs no
    place in the landing, unless it has to be written after all."""

    number: int
    run: Run
    last: bool
    pieces: Pieces
    nbytes: int
    lent: bytes = b""
    notice: bytes = b""


class Unconfirmed:
    """Chunks in the order of their numbers; the first of them leave."""

    def __init__(self) -> None:
        self._chunks: deque[Announced] = deque()

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Announced]:
        return iter(list(self._chunks))

    def add(self, chunk: Announced) -> None:
        self._chunks.append(chunk)

    def confirm(self, count: int) -> list[Announced]:
        """The first `count` chunks of the transfer were taken; returns those of them that it was not known of."""
        confirmed = []
        while self._chunks and self._chunks[0].number < count:
            confirmed.append(self._chunks.popleft())
        return confirmed

    def split(self, chunk: Announced, count: int) -> None:
        """Leaves `chunk` its first `count` pieces; the rest is a chunk behind it, and later ones have higher numbers.
        Only of what its receiver did not take, nor anything behind it."""
        at, pieces = self._chunks.index(chunk), chunk.pieces
        rest = pieces.cut(count, len(pieces))
        for later in list(self._chunks)[at + 1 :]:
            later.number, later.notice = later.number + 1, b""
        self._chunks.insert(at + 1, Announced(chunk.number + 1, chunk.run, chunk.last, rest, rest.nbytes, chunk.lent))
        chunk.pieces, chunk.last = pieces.cut(0, count), False
        chunk.nbytes = chunk.pieces.nbytes

    @property
    def lent(self) -> list[Announced]:
        """Those whose bytes are not in the landing."""
        return [chunk for chunk in self._chunks if chunk.lent]

    @property
    def lent_bytes(self) -> int:
        """Bytes of those."""
        return sum([chunk.nbytes for chunk in self._chunks if chunk.lent])
