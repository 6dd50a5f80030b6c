"""Stop strings in parsed output. Knows text and where the engine may have ended; never ends anything itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from services.recipe.deltas import Delta, Kind


class StopTrim:
    """Holds back text that may turn out to be, or to begin, a stop string.

    The engine alone decides whether a stop string ends generation (`min_tokens` may forbid it), and says so after the
    tokens that spell it. So a match in the newest batch stays held until either more output arrives (it was not an
    end) or `finish` tells which string ended it.

    The engine looks for stop strings in the text of all tokens, and a parser shows some control tokens as no text:
    those of `silent`. So a stop string that contains one is looked for as what remains of it, too.
    """

    def __init__(self, stops: Sequence[str], silent: Collection[str] = ()) -> None:
        self._silent = tuple(silent)
        forms = {form for stop in stops for form in (stop, self._shown(stop)) if form}
        # A control token may end reasoning: what is left of a string around it lies in reasoning and in content.
        crossing = {self._shown(stop) for stop in stops} - set(stops)
        self._within, self._across = tuple(sorted(forms - crossing)), tuple(sorted(crossing & forms))
        self._held: list[Delta] = []

    def push(self, batch: Sequence[Delta]) -> list[Delta]:
        """What may go out once `batch`, everything parsed from one step of the engine, is known."""
        if not batch:
            return []  # a silent token or half a character: nothing yet that tells the held text from an end
        old_chars = sum(len(delta.text) for delta in self._held)
        everything = [*self._held, *batch]
        within = _first_open(everything, self._within, {everything[-1].kind}, old_chars)
        across = _first_open(everything, self._across, {Kind.REASONING, Kind.CONTENT}, old_chars)
        out, self._held = _split(everything, min(within, across))
        return out

    def finish(self, batch: Sequence[Delta], stop: str) -> list[Delta]:
        """The rest, with the parser's last `batch`. A `stop` that ended generation is dropped with what follows it."""
        held, self._held = [*self._held, *batch], []
        text = "".join(delta.text for delta in held)
        for form in filter(None, (stop, self._shown(stop))):
            if (at := text.find(form)) >= 0:
                return _split(held, at)[0]
        return held

    def _shown(self, stop: str) -> str:
        """What a parser shows of `stop`."""
        for spelling in self._silent:
            stop = stop.replace(spelling, "")
        return stop


def _first_open(deltas: Sequence[Delta], stops: Sequence[str], kinds: Collection[Kind], old_chars: int) -> int:
    """Offset from which `deltas` must wait: a match that ends in new text, or an end that could become one.

    Only the last run of `kinds` counts: a stop string reaches neither across others nor into tool calls. The first
    `old_chars` characters were there before.
    """
    start = len(deltas)
    while start and deltas[start - 1].kind in kinds and deltas[start - 1].kind is not Kind.TOOL_CALL:
        start -= 1
    skipped = sum(len(delta.text) for delta in deltas[:start])
    text = "".join(delta.text for delta in deltas[start:])
    cut = len(text)
    for stop in stops:
        at = text.find(stop, max(0, old_chars - skipped - len(stop) + 1))
        cut = min(cut, at if at >= 0 else cut, _open_suffix(text, stop))
    return skipped + cut


def _open_suffix(text: str, stop: str) -> int:
    """Offset of the longest suffix of `text` that begins `stop`; len(text) when none does."""
    for start in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[start:]):
            return start
    return len(text)


def _split(deltas: Sequence[Delta], chars: int) -> tuple[list[Delta], list[Delta]]:
    """`deltas` before and after `chars` characters. Of a cut piece each log probability goes where its token begins."""
    before: list[Delta] = []
    for index, delta in enumerate(deltas):
        if chars < len(delta.text):
            if chars:
                own = _tokens_within(delta, chars)
                before.append(replace(delta, text=delta.text[:chars], logprobs=delta.logprobs[:own]))
                rest = replace(delta, text=delta.text[chars:], logprobs=delta.logprobs[own:], call_id="", name="")
            else:
                rest = delta
            return before, [rest, *deltas[index + 1 :]]
        before.append(delta)
        chars -= len(delta.text)
    return before, []


def _tokens_within(delta: Delta, chars: int) -> int:
    """How many tokens of `delta` begin within its first `chars` characters; all, where they do not spell its text."""
    spelled = [entry.get("bytes") for entry in delta.logprobs]
    sizes = [len(raw) for raw in spelled if isinstance(raw, list)]
    if sum(sizes) != len(delta.text.encode()):
        return len(delta.logprobs)
    cut = len(delta.text[:chars].encode())
    return sum(start < cut for start in accumulate(sizes[:-1], initial=0))
