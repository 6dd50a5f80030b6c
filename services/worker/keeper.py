"""Keeper: takes what the engine offers to the kvstore, one offer at a time, off the critical path. May always fail."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from engine.errors import EngineError, EngineStopped
from engine.offers import Offer
from engine.runner import EngineRunner
from fabric.errors import Exhausted, ServiceError
from fabric.retention import UNOWNED, Keeping
from fabric.telemetry import logs
from services.worker.items import Item, items_of
from services.worker.putter import Putter, Stored
from services.worker.stores import Store, Stores
from services.worker.telemetry import StoreMetrics

_log = logs.get("keeper")
_AGAIN_S = 0.5  # after the engine, or a store that is full of writers, had no time for us
# Of the time that is left, most that one attempt may take: so that it is known who did not answer.
_ANSWER_SHARE = 0.75


class Keeper:
    """The one taker of an engine's offers. Each is held until it is stored, refused or out of time, and no longer."""

    def __init__(self, engine: EngineRunner, stores: Stores, putter: Putter, metrics: StoreMetrics) -> None:
        self._engine, self._stores, self._putter, self._metrics = engine, stores, putter, metrics
        self._news = asyncio.Event()
        self.done = 0  # offers that ended
        engine.on_offer = self._news.set

    @property
    def pending(self) -> int:
        """Offers that wait or are being written: what a drain waits for."""
        return len(self._engine.engine.offers)

    async def run(self) -> None:
        """Takes offers until cancelled, or until the engine ended."""
        with suppress(EngineStopped):
            while True:
                await self._news.wait()
                self._news.clear()
                while (offer := await self._next()) is not None:
                    try:
                        await self._keep(offer)
                    finally:
                        self._engine.drop_offer(offer.offer_id)
                        self.done += 1

    async def _next(self) -> Offer | None:
        while True:
            try:
                return await self._engine.take_offer()
            except EngineStopped:
                raise
            except EngineError as error:
                _log.info("the engine gave no offer", error=type(error).__name__)
                await asyncio.sleep(_AGAIN_S)

    async def _keep(self, offer: Offer) -> None:
        """Stores what one offer holds. Any failure is counted by reason and ends it."""
        store = self._stores.home(offer.blocks[0].key)
        if store is None:
            self._metrics.offered("absent")
            return
        try:
            async with asyncio.timeout_at(offer.until_s):
                result = "stored" if await self._placed(store, offer) else "known"
        except ServiceError as error:
            result = error.code
        except TimeoutError:
            result = "timeout"
        self._metrics.offered(result)
        if result not in ("stored", "known"):
            _log.info("an offer was not stored", reason=result)

    async def _placed(self, home: Store, offer: Offer) -> int:
        """How many records were stored: at home, or where home says that their prefix still is."""
        stored = await self._put(home, offer)
        other = self._stores.named(stored.elsewhere) if stored.elsewhere else None
        return stored.records + ((await self._put(other, offer)).records if other is not None else 0)

    async def _put(self, store: Store, offer: Offer) -> Stored:
        """Asks again where a store has no room for a writer now; its deadline is the caller's."""
        keeping = offer.label if isinstance(offer.label, Keeping) else UNOWNED
        items: list[Item] = items_of(offer, self._engine.engine.model.layout)
        clock = asyncio.get_running_loop().time
        with self._stores.asking(store):
            while True:
                until_s = clock() + _ANSWER_SHARE * (offer.until_s - clock())
                try:
                    return await self._putter.put(store, items, keeping, until_s)
                except Exhausted as error:
                    await asyncio.sleep(error.retry_after_s or _AGAIN_S)
