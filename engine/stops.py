"""Stop conditions of one request: end tokens, stop tokens, stop strings and length. Knows no logits and no cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from engine.detokenize import Decode, Detokenizer
from engine.sampling.params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What stopped a request. The stopping token is part of the output; the parser trims what must not be shown."""

    token_id: int | None  # the end or stop token, the last token of the output
    string: str | None  # the stop string that the last token completed
    text_start: int | None  # where it starts, in characters of the whole output decoded with special tokens


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of a request and, unless it ran out of length, what matched."""

    reason: FinishReason
    match: StopMatch | None


class StopWatch:
    """Watches the output of one request. Generation stops at the token that completes a stop, never a token later."""

    def __init__(self, params: SamplingParams, eos_token_ids: Collection[int], decode: Decode | None) -> None:
        ends = () if params.ignore_eos else eos_token_ids
        self._params, self._tokens = params, frozenset(ends) | frozenset(params.stop_token_ids)
        if params.stop and decode is None:
            raise ValueError("stop strings need a decoder")
        self._text = Detokenizer(decode) if params.stop and decode is not None else None
        self._reach = max(map(len, params.stop), default=0) - 1
        self._tail = ""  # text that may begin a stop string
        self._tail_start = 0
        self._count = 0

    def push(self, token: int) -> Stop | None:
        """Take the next output token; the end of the request if this token is its last.

        Before `min_tokens` nothing stops; a stop string counts if its last character arrives at or after it.
        """
        self._count += 1
        match = self._string_match(token) if self._text is not None else None
        if self._count >= self._params.min_tokens:
            if token in self._tokens:
                return Stop(FinishReason.STOP, StopMatch(token, None, None))
            if match is not None:
                return Stop(FinishReason.STOP, match)
        return Stop(FinishReason.LENGTH, None) if self._count >= self._params.max_tokens else None

    def _string_match(self, token: int) -> StopMatch | None:
        assert self._text is not None  # noqa: S101  narrows the type; push() checked it
        known = len(self._tail)
        text = self._tail + self._text.push(token)
        stops = self._params.stop
        found = [(at, stop) for stop in stops if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0]
        match = min(found, default=None, key=lambda pair: pair[0])
        start = self._tail_start
        kept = text[-self._reach :] if self._reach else ""
        self._tail_start, self._tail = start + len(text) - len(kept), kept
        return None if match is None else StopMatch(None, match[1], start + match[0])
