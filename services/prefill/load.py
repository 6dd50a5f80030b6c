"""Load: fills the engine's prefix cache from the kvstore before a prompt is computed. May always miss; never fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from engine.errors import EngineError
from engine.layout import Layout
from engine.requests import HeldKV, Load, LocalPrefix
from engine.runner import EngineRunner
from fabric import wire
from fabric.channels import call
from fabric.errors import InvalidArgument, NotFound, ServiceError
from fabric.kvlink import Notice
from fabric.kvlink.incoming import Intake
from fabric.kvlink.link import Bytes
from fabric.kvlink.placing import Place
from fabric.kvlink.slabs import Writer
from fabric.records import Landing
from fabric.telemetry import logs
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.prefill.ask import PrefillAsk
from services.prefill.telemetry import PrefillMetrics
from services.worker.doubts import Doubts
from services.worker.extents import extent_view
from services.worker.geometry import Handoff
from services.worker.names import Names
from services.worker.receipts import require_extents, require_verified
from services.worker.stores import Store, Stores
from services.worker.together import settled

_log = logs.get("load")
# Of the time that a load may take, most that one answer may: so that it is known who did not answer.
_ANSWER_SHARE = 0.75


class Loader:
    """Asks, lands, verifies, adopts. What was not verified never enters the prefix cache."""

    def __init__(
        self,
        engine: EngineRunner,
        stores: Stores,
        intake: Intake,
        window_bytes: int,
        mint: Callable[[], str],
        timeout_s: float,
        metrics: PrefillMetrics,
        doubts: Doubts,
    ) -> None:
        """window_bytes: landing memory of one read, at most. doubts: told of stores that may still write to it."""
        self._engine, self._stores, self._intake = engine, stores, intake
        self._window_bytes, self._mint, self._timeout_s, self._metrics = window_bytes, mint, timeout_s, metrics
        self._doubts = doubts
        self._layout: Layout = engine.engine.model.layout

    def noticed(self, notice: Notice) -> None:
        """A notice arrived; one that is no store's is dropped."""
        self._intake.noticed(notice)

    async def load(self, ask: PrefillAsk) -> None:
        """Loads what a store has beyond this worker's own cache. Any failure is a miss, counted by reason."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._load(ask)
        except TimeoutError:
            self._metrics.store_miss("timeout")
        except ServiceError as error:
            self._metrics.store_miss(error.code)
        except EngineError as error:
            self._metrics.store_miss("engine")
            _log.info("nothing loaded", error=type(error).__name__)

    async def _load(self, ask: PrefillAsk) -> None:
        usable = (len(ask.tokens) - 1) // self._layout.block_tokens
        if usable * self._layout.block_tokens <= self._layout.replay.tokens or not ask.reads_cache:
            return
        local = await self._engine.call(self._engine.engine.lookup, ask.tokens, ask.salt)
        store = self._stores.home(local.keys[0])
        if store is None or self._here(local) >= usable:
            return
        names = block_names(ask.tokens, local.keys[:usable], self._layout.block_tokens)
        found = await self._find(store, names, local)
        if found is None:
            self._metrics.store_miss("absent")
            return
        store, blocks = found
        await self._fetch(store, ask, names, min(local.matched_blocks, blocks - 1), blocks)

    async def _find(self, store: Store, names: Names, local: LocalPrefix) -> tuple[Store, int] | None:
        """A store with a longer usable prefix than is here, following its hint to another one once."""
        reply = await self._lookup(store, names)
        here = self._here(local)
        if reply.other_blocks and reply.blocks_held + reply.other_blocks > here:
            other = self._stores.named(reply.other_instance)
            second = await self._second_lookup(other, names) if other is not None else None
            useful = second is not None and self._usable(second) > max(here, self._usable(reply))
            self._metrics.hint("useful" if useful else "stale")
            if other is not None and second is not None and useful:
                store, reply = other, second
        return (store, self._usable(reply)) if self._usable(reply) > here else None

    async def _second_lookup(self, store: Store, names: Names) -> pb.LookupResponse | None:
        """A hint may name one that does not answer: what the first store holds is still a hit then."""
        try:
            return await self._lookup(store, names)
        except ServiceError:
            return None

    def _here(self, local: LocalPrefix) -> int:
        """Blocks that this worker's own cache can continue."""
        return local.hit_tokens // self._layout.block_tokens if self._layout.anchored else local.matched_blocks

    def _usable(self, reply: pb.LookupResponse) -> int:
        """Blocks of the store's prefix that can be continued: all of them where no anchor has to follow."""
        return reply.anchor_blocks if self._layout.anchored else reply.blocks_held

    async def _lookup(self, store: Store, names: Names) -> pb.LookupResponse:
        model = self._engine.engine.model
        request = pb.LookupRequest(
            names=names.pack(),
            model_revision=model.revision,
            layout_fingerprint=model.layout.fingerprint,
            anchor=model.layout.anchored,
        )
        with self._stores.asking(store):
            reply: pb.LookupResponse = await call(store.stub.Lookup, request, timeout_s=_ANSWER_SHARE * self._timeout_s)
        return reply

    async def _fetch(self, store: Store, ask: PrefillAsk, names: Names, first: int, end: int) -> None:
        """Blocks [first, end), with their anchor if one is needed: memory, landing, Get, verification, cache."""
        engine = self._engine.engine
        load = await self._engine.begin_load(ask.tokens, ask.salt, first, end)
        try:
            await self._land(store, names, load)
            await self._engine.call(engine.finish_load, load, end - first)
        finally:
            self._engine.abandon_load(load)  # of no effect once it was finished; nobody waits for it
        self._metrics.store_hit(end - first)

    async def _land(self, store: Store, names: Names, load: Load) -> None:
        """Has the store write the records into a landing, from where each chunk is verified into the load's memory."""
        size = self._layout.block_tokens
        tokens, held = load.to_block * size, load.from_block * size
        handoff = Handoff(self._layout, tokens, held, windows=self._layout.anchored)
        window = min(handoff.landing_bytes, max(self._window_bytes, self._layout.largest_extent))
        landing = self._intake.open(self._mint(), window, self._place(handoff, load))
        writer = Writer.UNKNOWN
        try:
            with self._metrics.transfer(handoff.landing_bytes):
                reply = await self._get(store, names, load, landing)
                writer = Writer.FINISHED
                if reply.blocks < load.to_block - load.from_block or reply.anchor != self._layout.anchored:
                    raise NotFound("the records left the store meanwhile")
                extents = wire.unpack_extents(common.ExtentList(extents=reply.extents))
                require_extents(extents, handoff)
                require_verified(extents, await self._intake.ready(landing.id, self._timeout_s))
        finally:
            if writer is Writer.UNKNOWN:
                self._doubts.add(landing.id, store.life)
            await settled(self._intake.close(landing.id, writer))

    async def _get(self, store: Store, names: Names, load: Load, landing: Landing) -> pb.GetResponse:
        first, model = load.from_block, self._engine.engine.model
        request = pb.GetRequest(
            names=names.pack(first, load.to_block),
            first_block=first,
            anchor=self._layout.anchored,
            model_revision=model.revision,
            layout_fingerprint=model.layout.fingerprint,
            landing=wire.pack_landing(landing),
            parent_key=names.keys[first - 1] if first else b"",
        )
        with self._stores.asking(store):
            reply: pb.GetResponse = await call(store.stub.Get, request, timeout_s=_ANSWER_SHARE * self._timeout_s)
        return reply

    def _place(self, handoff: Handoff, load: Load) -> Place:
        """The load's memory, and nothing else of the pool."""
        pool = self._engine.engine.pool
        kv = HeldKV((*[-1] * load.from_block, *load.blocks), load.slot, 0)
        wanted = {(place.group, place.block): place.size for place in handoff.places()}

        def place(group: str, block: int, size: int) -> Bytes:
            if wanted.get((group, block)) != size:
                raise InvalidArgument(f"block {block} of {group!r} was not asked for", field="extents")
            return extent_view(pool, group, block, kv)

        return place


def block_names(tokens: Sequence[int], keys: Sequence[bytes], size: int) -> Names:
    """How a store is asked for the blocks of `keys`, each of `size` tokens, from the start of `tokens`."""
    return Names(keys, np.asarray(tokens[: len(keys) * size], "<u4").tobytes())
