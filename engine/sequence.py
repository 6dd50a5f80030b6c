"""Sequence: one request while the engine works on it. Knows its tokens, memory and progress; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.events import Usage
from engine.images import ImageSpan
from engine.prefix import KeyChain
from engine.sampling.logprobs import TokenLogprob
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Row
from engine.stops import Stop, StopWatch


class Role(Enum):
    """Which of its lives a request leads here."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


class Phase(Enum):
    """Where a sequence stands; only WAITING and RUNNING belong to the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the scheduler while it waits or runs, by the engine while it is held."""

    request_id: str
    role: Role
    prompt_tokens: int
    tokens: list[int]  # prompt and output
    output: list[int]
    sampling: SamplingParams
    seed: int
    cache: bool
    rank: int  # lower goes first
    arrived_s: float
    chain: KeyChain
    watch: StopWatch
    images: tuple[ImageSpan, ...] = ()
    offer_as: object | None = None  # what a store is told of its blocks; None: they are not offered
    phase: Phase = Phase.WAITING
    blocks: list[int] = field(default_factory=list)
    slot: int | None = None
    anchor_slot: int | None = None  # held for storing until release
    anchor_tokens: int = 0
    rolling_anchor: int | None = None  # block whose anchor a later one of this sequence replaces
    computed_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, found and not computed again; None until first admitted
    found_blocks: int = 0  # leading blocks that were found when it was first admitted, replayed or not
    replay_hit: int = 0  # tokens whose entries are cached though their window rows were not: computed from before here
    entries_only: bool = False  # a prefill that draws nothing: decode replays its last window
    upper_from: int = 0  # first position that goes above a replaying model's last entry source
    sealed_blocks: int = 0
    offered_blocks: int = 0  # leading blocks that were offered to a store, or that somebody else offers
    suspect_tokens: int = 0  # runs alone until this many tokens are computed: a batch with it has failed
    paused: bool = False
    begun: bool = False  # has drawn a token in this life, or published all its entries
    stop: Stop | None = None  # known as soon as the last token is
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.tokens)

    @property
    def pending_tokens(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.tokens) - self.computed_tokens

    @property
    def decoding(self) -> bool:
        """Whether only the last output token is pending."""
        return bool(self.output) and self.pending_tokens == 1

    @property
    def row(self) -> Row:
        """What the sampler must know to choose the next token."""
        prompt = self.tokens[: self.prompt_tokens] if self.sampling.repetition_penalty != 1.0 else ()
        return Row(self.sampling, self.seed, prompt, self.output)

    @property
    def goes_on(self) -> bool:
        """Whether a token is all that is wanted next, and unless that is a stop another one follows."""
        row = Row(self.sampling, self.seed, (), self.output)
        return row.plain and (row.greedy or row.drawn) and len(self.output) + 1 < self.sampling.max_tokens

    @property
    def suspect(self) -> bool:
        """Whether it must run alone."""
        return self.computed_tokens < self.suspect_tokens

    @property
    def reads_cache(self) -> bool:
        """Whether a prefix hit may replace computing: not when every prompt token's logits are wanted."""
        return self.cache and self.sampling.prompt_logprobs is None

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(self.prompt_tokens, self.cached_tokens or 0, len(self.output))
