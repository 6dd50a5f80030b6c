"""Engine events: what a step changed for a request. Frozen values; knows no state."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError
from engine.sampling.logprobs import TokenLogprob
from engine.sampling.params import SamplingState
from engine.stops import FinishReason, Stop, StopMatch


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `cached_tokens`: of the prompt, found in a cache and not computed again."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A prefill chunk is in the cache: every full block up to `computed_tokens` is final."""

    request_id: str
    computed_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first new token. Last event of a prefill request, which then holds its KV; `stop` if it ends the request."""

    request_id: str
    token: int
    logprob: TokenLogprob | None
    state: SamplingState
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None  # one per prompt token; nothing precedes the first
    cached_tokens: int
    held: bool
    stop: Stop | None


@dataclass(frozen=True, slots=True)
class EntriesReady:
    """Every entry of the prompt is in the cache and held; nothing was drawn, for decode replays the last window.

    The last event of such a prefill.
    """

    request_id: str
    state: SamplingState
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokensOut:
    """New output tokens; `first_index` counts from the first output token of the request's first life."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended and holds nothing any more."""

    request_id: str
    reason: FinishReason
    usage: Usage
    stop_match: StopMatch | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed alone and holds nothing any more."""

    request_id: str
    error: EngineError


@dataclass(frozen=True, slots=True)
class Preempted:
    """The request lost its blocks and will be recomputed. Chunks reported before are void: the blocks change."""

    request_id: str


Event = ChunkDone | FirstToken | EntriesReady | TokensOut | Finished | Failed | Preempted


def is_last(event: Event) -> bool:
    """Whether nothing follows `event` for its request."""
    return isinstance(event, EntriesReady | Finished | Failed) or (isinstance(event, FirstToken) and event.held)
