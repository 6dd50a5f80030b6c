"""Prefetch: has the kvstore bring up what a prompt will need before the prompt comes. Soft: it may do nothing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from engine.prefix import Salt
from engine.requests import LocalPrefix
from engine.runner import EngineRunner
from fabric.channels import call
from fabric.errors import ServiceError
from fabric.telemetry import logs
from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.prefill.load import block_names
from services.prefill.telemetry import PrefillMetrics
from services.worker.failures import engine_errors
from services.worker.names import Names
from services.worker.stores import Store, Stores

MAX_LIVE = 32  # hints at a time; more are dropped
_log = logs.get("prefetch")


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Tokens that a request would find, here or in a store, and how many of them a store brings up now."""

    held_tokens: int
    rising_tokens: int


class Prefetcher:
    """Asks the home of a prefix, and the store that has what home has not."""

    def __init__(self, engine: EngineRunner, stores: Stores, timeout_s: float, metrics: PrefillMetrics) -> None:
        self._engine, self._stores, self._timeout_s, self._metrics = engine, stores, timeout_s, metrics
        self._layout = engine.engine.model.layout
        self._live = 0

    async def prefetch(self, tokens: tuple[int, ...], salt: Salt) -> Prefetched:
        """Whatever a store does not do is only missing from the answer.

        Raises:
            InvalidArgument: it is no prompt of this model. Unavailable: the engine does not answer.
        """
        if self._live >= MAX_LIVE:
            self._metrics.prefetch("dropped", 0)
            return Prefetched(0, 0)
        self._live += 1
        try:
            with engine_errors():
                local = await self._engine.call(self._engine.engine.lookup, tokens, salt)
            return await self._ask(tokens, local)
        finally:
            self._live -= 1

    async def _ask(self, tokens: tuple[int, ...], local: LocalPrefix) -> Prefetched:
        size = self._layout.block_tokens
        usable = (len(tokens) - 1) // size
        home = self._stores.home(local.keys[0]) if usable else None
        if home is None or local.hit_tokens >= usable * size:
            return Prefetched(local.hit_tokens, 0)
        names = block_names(tokens, local.keys[:usable], size)
        try:
            held, rising = await self._asked(home, names)
        except ServiceError as error:
            self._metrics.prefetch("failed", 0)
            _log.info("nothing was prefetched", error=error.code)
            return Prefetched(local.hit_tokens, 0)
        self._metrics.prefetch("asked", rising)
        return Prefetched(max(local.hit_tokens, held * size), rising * size)

    async def _asked(self, home: Store, names: Names) -> tuple[int, int]:
        """Blocks held and rising at the store that holds most, where home knows who that is."""
        reply = await self._prefetch(home, names)
        other = self._stores.named(reply.other_instance) if reply.other_instance else None
        if other is not None:
            with suppress(ServiceError):  # a hint may name one that does not answer
                second = await self._prefetch(other, names)
                reply = max(reply, second, key=lambda each: each.blocks_held)
        return reply.blocks_held, reply.blocks_rising

    async def _prefetch(self, store: Store, names: Names) -> pb.PrefetchResponse:
        model = self._engine.engine.model
        request = pb.PrefetchRequest(
            names=names.pack(),
            model_revision=model.revision,
            layout_fingerprint=model.layout.fingerprint,
            anchor=model.layout.anchored,
        )
        with self._stores.asking(store):
            reply: pb.PrefetchResponse = await call(store.stub.Prefetch, request, timeout_s=self._timeout_s)
        return reply
