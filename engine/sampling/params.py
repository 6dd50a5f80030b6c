"""Sampling parameters: what a request may ask of the sampler, and what is refused. Knows no logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from engine.errors import InvalidParameter

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_TOP_LOGPROBS = 20
MAX_NEW_TOKENS = 2**31 - 1  # what a message carries; what a model has room for is known where its context is


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Defaults sample from the model's own distribution; `temperature=0` is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int | None = None  # None: derived from the request id
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None: none; n: the chosen token's and the n likeliest tokens'
    prompt_logprobs: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0  # until then end tokens and stop token ids are masked and stop strings are not looked for
    ignore_eos: bool = False  # end tokens may be chosen and do not stop

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidParameter for the first field that cannot be used with a vocabulary of `vocab_size`."""
        for name, accepts, fix in _NUMBERS:
            _require_number(name, getattr(self, name), accepts, fix)
        for name, low, high in _INTEGERS:
            _require_integer(name, getattr(self, name), low, high)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParameter("ignore_eos", "must be true or false", "send a boolean")
        if self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", "exceeds max_tokens", "lower it")
        _require_stops(self.stop)
        _require_tokens("stop_token_ids", self.stop_token_ids, vocab_size)

    def seed_for(self, request_id: str) -> int:
        """The seed of the request's random stream: the one asked for, else one derived from its id."""
        if self.seed is not None:
            return self.seed
        return int.from_bytes(blake3(request_id.encode()).digest(8), "little")


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Where a random stream stands: draw i depends only on (seed, i). Penalties are recomputed from tokens."""

    seed: int
    emitted: int  # tokens drawn so far


def is_integer(value: object) -> bool:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


_NUMBERS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda value: 0.0 <= value <= 100.0, "use a number from 0 to 100"),
    ("top_p", lambda value: 0.0 < value <= 1.0, "use a number above 0, at most 1"),
    ("min_p", lambda value: 0.0 <= value <= 1.0, "use a number from 0 to 1"),
    ("repetition_penalty", lambda value: 0.0 < value <= 10.0, "use a number above 0, at most 10"),
    ("presence_penalty", lambda value: -2.0 <= value <= 2.0, "use a number from -2 to 2"),
    ("frequency_penalty", lambda value: -2.0 <= value <= 2.0, "use a number from -2 to 2"),
)
_INTEGERS: tuple[tuple[str, int, int], ...] = (
    ("top_k", 0, 2**31 - 1),
    ("max_tokens", 1, MAX_NEW_TOKENS),
    ("min_tokens", 0, MAX_NEW_TOKENS),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
)
_OPTIONAL = frozenset({"seed", "logprobs", "prompt_logprobs"})


def _require_number(name: str, value: object, accepts: Callable[[float], bool], fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParameter(name, f"must be a number, got {type(value).__name__}", fix)
    if not math.isfinite(value) or not accepts(value):
        raise InvalidParameter(name, f"{value} is out of range", fix)


def _require_integer(name: str, value: object, low: int, high: int) -> None:
    if value is None and name in _OPTIONAL:
        return
    fix = f"use an integer from {low} to {high}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameter(name, f"must be an integer, got {type(value).__name__}", fix)
    if not low <= value <= high:
        raise InvalidParameter(name, f"{value} is out of range", fix)


def _require_stops(stops: object) -> None:
    if not isinstance(stops, tuple) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidParameter("stop", "must be a tuple of strings", "send a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidParameter("stop", f"{len(stops)} stop strings", f"use at most {MAX_STOP_STRINGS}")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise InvalidParameter("stop", "a stop string is empty or too long", f"use 1 to {MAX_STOP_CHARS} characters")


def _require_tokens(name: str, tokens: object, vocab_size: int) -> None:
    if not isinstance(tokens, tuple) or not all(is_integer(token) for token in tokens):
        raise InvalidParameter(name, "must be a tuple of integers", "send a list of token ids")
    if len(tokens) > MAX_STOP_TOKENS:
        raise InvalidParameter(name, f"{len(tokens)} tokens", f"use at most {MAX_STOP_TOKENS}")
    require_vocabulary(name, tokens, vocab_size)


def require_vocabulary(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidParameter if a token id of field `name` is outside the vocabulary."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidParameter(name, "a token id is outside the vocabulary", f"use ids from 0 to {vocab_size - 1}")
