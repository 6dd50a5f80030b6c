"""Storage: what a worker opens to reach the kvstore instances, for reading and for writing. Knows no request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from fabric.channels import Channels
from fabric.discovery import open_discovery
from fabric.lifecycle import background
from services.worker.core import Core
from services.worker.keeper import Keeper
from services.worker.putter import Putter
from services.worker.regions import PoolRegions
from services.worker.settings import WorkerSettings
from services.worker.stores import Stores
from services.worker.telemetry import StoreMetrics


@dataclass(frozen=True, slots=True)
class Storage:
    """`stores` are none where settings say so: then nothing is found, and what is offered is let go of at once."""

    stores: Stores
    keeper: Keeper


@asynccontextmanager
async def open_storage(core: Core, regions: PoolRegions, settings: WorkerSettings) -> AsyncIterator[Storage]:
    """Follows discovery and stores what the engine offers, until it is left."""
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        stores = Stores(open_discovery(settings.discovery), channels)
        if settings.kvstore:
            await stack.enter_async_context(background(stores.follow(), "stores"))
            await stack.enter_async_context(background(stores.probe(), "silent stores"))
        metrics = StoreMetrics(core.metrics, core.service)
        putter = Putter(core.engine.engine.model, core.link, regions, metrics)
        keeper = Keeper(core.engine, stores, putter, metrics)
        await stack.enter_async_context(background(keeper.run(), "keeper"))
        yield Storage(stores, keeper)
