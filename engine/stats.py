"""Engine statistics: one snapshot of what is busy and what was done. Frozen values; knows no metrics system."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Totals since the engine opened; only the engine changes them."""

    steps: int = 0
    computed_tokens: int = 0  # tokens that went through the model, recomputed ones included
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    failed: int = 0

    def reset(self) -> None:
        """Start counting anew."""
        for field in fields(self):
            setattr(self, field.name, 0)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`free + cached + held == total`, for blocks and for slots; cached ones go as soon as somebody needs them."""

    waiting: int
    running: int
    held: int  # prefill requests whose KV waits to be released
    reserved: int
    loading: int
    queued_tokens: int
    oldest_wait_s: float
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    slots_total: int
    slots_free: int
    slots_cached: int
    slots_held: int
    anchors: int
    steps: int
    computed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    finished: int
    failed: int
    offers: int = 0  # sets of blocks held for a store
    offers_bytes: int = 0  # what is new in those that wait
    offers_refused: int = 0
    offers_late: int = 0
    offers_taken_back: int = 0
