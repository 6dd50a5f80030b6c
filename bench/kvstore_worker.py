"""A worker's half of the kvstore's calls: Put, Lookup and Get over a real link, every byte verified; no engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from engine.layout import CacheGroup, GroupKind, Layout
from fabric import wire
from fabric.channels import Channels, call
from fabric.errors import DataLoss
from fabric.kvlink import open_link, plan
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Bytes, Link, Region
from fabric.kvlink.slabs import Writer
from fabric.kvlink.verify import CopyKernel, digest
from fabric.lifecycle import background
from fabric.records import Extent, Landing
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_admin_pb2 as admin
from protos.deepinfer.v1 import kvstore_admin_pb2_grpc as admin_rpc
from protos.deepinfer.v1 import kvstore_pb2 as pb
from protos.deepinfer.v1 import kvstore_pb2_grpc as rpc
from services.worker.names import Names
from services.worker.notices import HandoffNotice

REVISION = "bench"
ROOT = bytes(32)
TIMEOUT_S = 30.0
_MOST = 512  # blocks of one offer or read
_GROUP = "latent"


def layout_of(block_bytes: int, block_tokens: int) -> Layout:
    """A model that caches one group without windows: every block is one extent of `block_bytes`."""
    group = CacheGroup(_GROUP, GroupKind.GLOBAL, 1, 1, block_tokens, block_bytes, "uint8", "1")
    return Layout(block_tokens, 0, (group,))


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a prefix, by the name that the store knows it under: a worker makes it for its Lookup."""

    key: bytes
    parent: bytes
    name: pb.BlockName


def chain(ids: Sequence[int], block_tokens: int) -> list[Block]:
    """The blocks of a prefix whose blocks are numbered: equal leading numbers give equal leading keys."""
    blocks: list[Block] = []
    parent = ROOT
    for number in ids:
        key = blake3(parent + number.to_bytes(8, "little")).digest()
        tokens = np.array([number & 0x7FFFFFFF, *range(block_tokens - 1)], "<u4").tobytes()
        blocks.append(Block(key, parent, pb.BlockName(key=key, tokens=tokens)))
        parent = key
    return blocks


def _names(blocks: Sequence[Block]) -> Names:
    return Names([block.key for block in blocks], b"".join([block.name.tokens for block in blocks]))


@dataclass(frozen=True, slots=True)
class Read:
    """What a Get brought: `blocks` leading blocks, and the digests that were verified where they arrived."""

    blocks: int
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stubs:
    """What a worker calls, and what an operator does."""

    calls: rpc.KvStoreServiceStub
    operator: admin_rpc.KvStoreAdminServiceStub


class StoreWorker:
    """One worker at one kvstore. Use `opened`."""

    def __init__(
        self,
        link: Link,
        stubs: Stubs,
        layout: Layout,
        window_bytes: int,
        kernel: CopyKernel | None,
        beside_bytes: int,
    ) -> None:
        self.link, self._stubs, self.layout, self._window_bytes = link, stubs, layout, window_bytes
        self.landings = LandingPool(link, 2 * window_bytes + beside_bytes, kernel=kernel)
        self.intake = Intake(link, self.landings)
        self._numbers = itertools.count()

    async def follow(self) -> None:
        """Takes the link's notices until cancelled."""
        async for notice in self.link.notices():
            self.intake.noticed(notice)

    async def lookup(self, blocks: Sequence[Block]) -> int:
        """Leading blocks that the store holds."""
        request = pb.LookupRequest(
            names=_names(blocks).pack(),
            model_revision=REVISION,
            layout_fingerprint=self.layout.fingerprint,
        )
        reply: pb.LookupResponse = await call(self._stubs.calls.Lookup, request, timeout_s=TIMEOUT_S)
        return reply.blocks_held

    async def get(self, blocks: Sequence[Block], target: Bytes, first: int = 0) -> Read:
        """Reads `blocks`, number `first` of their prefix and those behind it, into `target` (uint8 [n, block_bytes]).

        Raises:
            ServiceError: a write failed, or what came is not what was announced.
        """
        size = self.layout.block_bytes
        places = {first + index: target[index] for index in range(len(blocks))}
        owner = f"read-{next(self._numbers)}"
        window = min(len(blocks) * size, max(self._window_bytes, size))
        landing = self.intake.open(owner, window, lambda group, block, size: places[block])
        writer = Writer.UNKNOWN
        try:
            reply = await self._ask(blocks, first, landing)
            writer = Writer.FINISHED
            found = await self.intake.ready(owner, TIMEOUT_S) if reply.blocks else {}
        finally:
            await self.intake.close(owner, writer)
        digests = []
        for extent in reply.extents:
            if found.get((extent.group, extent.block)) != (extent.valid_entries, extent.size, extent.digest):
                raise DataLoss(f"block {extent.block} was told, and did not come", field="extents")
            digests.append(extent.digest)
        return Read(reply.blocks, tuple(digests))

    async def empty_dram(self) -> None:
        """Makes the store forget what is in DRAM; what is on disk stays there."""
        wanted = admin.RecordFilter(tier=admin.RECORD_TIER_DRAM)
        request = admin.EvictRecordsRequest(filter=wanted, execute=True)
        async for _ in self._stubs.operator.EvictRecords(request, timeout=TIMEOUT_S):
            pass

    async def put(self, blocks: Sequence[Block], source: Region, starts: Sequence[int]) -> int:
        """Offers blocks whose bytes lie at `starts` of `source`; returns how many the store took in."""
        commit: asyncio.Future[pb.PutRequest] = asyncio.get_running_loop().create_future()
        running = self._stubs.calls.Put(self._messages(blocks, commit), timeout=TIMEOUT_S)
        stored = 0
        async for reply in running:
            if reply.WhichOneof("message") == "grant":
                commit.set_result(await self._fill(reply.grant, source, starts))
            else:
                stored = reply.committed.stored
        return stored

    async def put_all(self, blocks: Sequence[Block], source: Region, starts: Sequence[int]) -> None:
        """Puts blocks of one prefix, as many at a time as the store grants. Raises DataLoss where it refuses some."""
        done = 0
        while done < len(blocks):
            some = slice(done, done + _MOST)
            stored = await self.put(blocks[some], source, starts[some])
            if not stored:
                raise DataLoss(f"the store took {done} of {len(blocks)} blocks", fix="give it more memory")
            done += stored

    async def _ask(self, blocks: Sequence[Block], first: int, landing: Landing) -> pb.GetResponse:
        request = pb.GetRequest(
            names=_names(blocks).pack(),
            first_block=first,
            parent_key=blocks[0].parent,
            model_revision=REVISION,
            layout_fingerprint=self.layout.fingerprint,
            landing=wire.pack_landing(landing),
        )
        reply: pb.GetResponse = await call(self._stubs.calls.Get, request, timeout_s=TIMEOUT_S)
        return reply

    async def _messages(
        self, blocks: Sequence[Block], commit: asyncio.Future[pb.PutRequest]
    ) -> AsyncIterator[pb.PutRequest]:
        size = self.layout.block_bytes
        records = [
            pb.RecordOffer(kind=pb.RECORD_KIND_BLOCK, name=block.name, parent_key=block.parent, size=size)
            for block in blocks
        ]
        layout = wire.pack_layout(self.layout)
        yield pb.PutRequest(offer=pb.PutOffer(records=records, model_revision=REVISION, layout=layout))
        yield await commit

    async def _fill(self, grant: pb.PutGrant, source: Region, starts: Sequence[int]) -> pb.PutRequest:
        size = self.layout.block_bytes
        froms = [starts[index] for index in grant.wanted]
        if froms:
            landing = wire.unpack_landing(grant.landing)
            offsets = np.array(grant.offsets, dtype=np.int64)
            sizes = np.full(len(froms), size, dtype=np.int64)
            write = plan.write_to(landing, source, np.array(froms, dtype=np.int64), offsets, sizes)
            notify = HandoffNotice(landing.id, last=True).dump()
            await self.link.push(landing.address, [write], notify=notify, timeout_s=TIMEOUT_S)
        records = [
            wire.pack_extents([Extent(_GROUP, 0, 1, offset, size, digest(source.memory[start : start + size]))])
            for start, offset in zip(froms, grant.offsets, strict=True)
        ]
        return pb.PutRequest(commit=pb.PutCommit(records=records, digest_kind=common.DIGEST_KIND_XXH3_64))


@asynccontextmanager
async def opened(
    address: str,
    transport: str,
    layout: Layout,
    window_bytes: int,
    kernel: CopyKernel | None = None,
    beside_bytes: int = 64 << 20,
) -> AsyncIterator[StoreWorker]:
    """A worker at the kvstore of this address, with a link of its own. `kernel`: what workers of services copy with.
    `beside_bytes`: landing memory beside that of two reads."""
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        link = open_link(transport, "bench-worker", 1)
        stack.push_async_callback(link.close)
        calls = channels.stub(rpc.KvStoreServiceStub, address)
        stubs = Stubs(calls, channels.stub(admin_rpc.KvStoreAdminServiceStub, address))
        worker = StoreWorker(link, stubs, layout, window_bytes, kernel, beside_bytes)
        stack.push_async_callback(worker.intake.aclose)
        await stack.enter_async_context(background(worker.follow(), "notices"))
        yield worker
