"""Who can serve: what the flow asks of the pool, and one choice of a pair. Knows no network."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from protos.deepinfer.v1 import common_pb2
from services.gateway.job import ModelLimits
from services.gateway.peers import Decode, Prefill, Recipe
from services.gateway.router import Demand


@dataclass(frozen=True, slots=True)
class Chosen:
    """A pair for one request. `settle`, called once, takes the request off their load again."""

    prefill_key: str
    decode_key: str
    prefill: Prefill
    decode: Decode
    layout: common_pb2.Layout  # prefill's
    model_revision: str
    settle: Callable[[], None]
    writer: common_pb2.Incarnation | None = None  # the prefill, as decode will have to recognise it
    decode_epoch: int = 0
    replays: bool = False  # decode draws the first token

    def key_of(self, side: str) -> str:
        """The worker of "prefill" or "decode"."""
        return self.prefill_key if side == "prefill" else self.decode_key


class Workers(Protocol):
    """The services that are there now."""

    def limits(self, model: str) -> ModelLimits:
        """Raises NotFound for a model that nobody serves, Unavailable where one of its sides is missing."""
        ...

    def recipe(self, model: str, excluded: frozenset[str]) -> AbstractContextManager[Recipe]:
        """One for a whole request: it stays connected while the context is open, though it may be leaving.

        Raises:
            NotFound, Unavailable: none outside `excluded` answers.
        """
        ...

    def choose(self, demand: Demand, excluded: frozenset[str]) -> Chosen:
        """Raises Unavailable where no pair is left outside `excluded`."""
        ...
