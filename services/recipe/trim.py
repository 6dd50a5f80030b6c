"""Stop strings in parsed output. Knows text and where the engine may have ended; never ends anything itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.recipe.deltas import Delta, Kind


class StopTrim:
    """Holds back text that may turn out to be, or to begin, a stop string.

    The engine alone decides whether a stop string ends generation (`min_tokens` may forbid it), and says so after the
    tokens that spell it. So a match in the newest batch stays held until either more output arrives (it was not an
    end) or `finish` tells which string ended it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held: list[Delta] = []

    def push(self, batch: Sequence[Delta]) -> list[Delta]:
        """What may go out once `batch`, everything parsed from one step of the engine, is known."""
        if not self._stops:
            return list(batch)
        old_chars = sum(len(delta.text) for delta in self._held)
        everything = [*self._held, *batch]
        start = _run_start(everything)
        skipped = sum(len(delta.text) for delta in everything[:start])
        text = "".join(delta.text for delta in everything[start:])
        cut = self._first_open(text, max(0, old_chars - skipped))
        out, self._held = _split(everything, skipped + cut)
        return out

    def finish(self, batch: Sequence[Delta], stop: str) -> list[Delta]:
        """The rest, with the parser's last `batch`. A `stop` that ended generation is dropped with what follows it."""
        held, self._held = [*self._held, *batch], []
        if not stop:
            return held
        at = "".join(delta.text for delta in held).find(stop)
        return held if at < 0 else _split(held, at)[0]

    def _first_open(self, text: str, old_chars: int) -> int:
        """Offset from which `text` must wait: a match that ends in new text, or an end that could become one."""
        cut = len(text)
        for stop in self._stops:
            at = text.find(stop, max(0, old_chars - len(stop) + 1))
            if at >= 0:
                cut = min(cut, at)
            cut = min(cut, _open_suffix(text, stop))
        return cut


def _open_suffix(text: str, stop: str) -> int:
    """Offset of the longest suffix of `text` that begins `stop`; len(text) when none does."""
    for start in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[start:]):
            return start
    return len(text)


def _run_start(deltas: Sequence[Delta]) -> int:
    """Index of the last run of one kind of text: a stop string does not reach across kinds nor into tool calls."""
    start = len(deltas)
    while start and deltas[start - 1].kind is deltas[-1].kind and deltas[start - 1].kind is not Kind.TOOL_CALL:
        start -= 1
    return start


def _split(deltas: Sequence[Delta], chars: int) -> tuple[list[Delta], list[Delta]]:
    """`deltas` before and after `chars` characters; log probabilities go with the first part of a cut piece."""
    before: list[Delta] = []
    for index, delta in enumerate(deltas):
        if chars < len(delta.text):
            if chars:
                before.append(replace(delta, text=delta.text[:chars]))
                rest = replace(delta, text=delta.text[chars:], logprobs=(), call_id="", name="")
            else:
                rest = delta
            return before, [rest, *deltas[index + 1 :]]
        before.append(delta)
        chars -= len(delta.text)
    return before, []
