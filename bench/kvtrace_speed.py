"""How fast the index and the policy answer, and what they take per block. Real keys and tiers, hardly any bytes of KV.

Lookups are those of `Tiers.lookup`, which compares tokens in DRAM and takes keys on disk at their word; reads are those
of `Tiers.collect`, which finds the same again, and of `Tiers.use`, which tells the policy.
"""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import TypeVar

from bench.kvtrace_tiers import BLOCK_BYTES, EXTENTS, IDENTITY, MemorySegments
from bench.table import Row
from services.kvstore.eviction import EvictionOrder
from services.kvstore.nvme.files import Place
from services.kvstore.nvme.format import PAGE, Stored
from services.kvstore.nvme.index import SegmentIndex
from services.kvstore.nvme.tier import NvmeTier
from services.kvstore.policy.budget import Budgets
from services.kvstore.policy.retention import WarmWindow
from services.kvstore.policy.traits import Arrival
from services.kvstore.records import ROOT, BlockName, Identity, Record, RecordId, RecordKind, sample
from services.kvstore.tier import DramTier
from services.kvstore.tiers import Tiers

CHAINS, CHAIN, TOKENS = 200, 100, 128
BLOCKS = CHAINS * CHAIN
SEGMENT = 64
LOOKUPS_BAR = 200_000.0
Chains = Sequence[Sequence[BlockName]]
Ask = Callable[[Sequence[BlockName], Identity], object]
T = TypeVar("T")


def speed_rows() -> list[Row]:
    """Lookups per CPU second of this process, with and without the policies told of each hit; bytes per block."""
    chance = random.Random(0)
    tokens = bytes(4 * TOKENS)
    chains = [[BlockName(chance.randbytes(32), tokens) for _ in range(CHAIN)] for _ in range(CHAINS)]
    warm, warm_bytes = _measured(lambda: _warm(chains))
    cold, cold_bytes = _measured(lambda: _cold(chains))
    ids = [[RecordId(RecordKind.BLOCK, name.key) for name in chain] for chain in chains]
    order, order_bytes = _measured(lambda: _order(ids))
    slab = warm.dram.capacity / BLOCKS
    return [
        Row("lookups of blocks in DRAM", _rate(warm.lookup, chains), "/s", LOOKUPS_BAR, ">="),
        Row("lookups of blocks on disk", _rate(cold.lookup, chains), "/s", LOOKUPS_BAR, ">="),
        Row("uses that the policy learns of", _rate(_touched(order, ids), chains), "/s", LOOKUPS_BAR, ">="),
        Row("reads of blocks in DRAM, found and told the policy", _rate(_collected(warm), chains), "/s"),
        Row("memory of policy alone, keys aside", order_bytes / BLOCKS, "B per block"),
        Row("memory of DRAM's index and policy", warm_bytes / BLOCKS - slab, "B per block"),
        Row("memory of the disk's index and policy", cold_bytes / BLOCKS, "B per block"),
    ]


def _warm(chains: Chains) -> Tiers:
    """All blocks in DRAM, no disk below."""
    tier = DramTier(BLOCKS * BLOCK_BYTES, lambda: 0.0)
    for chain in chains:
        for index, name in enumerate(chain):
            place, parent = tier.take(BLOCK_BYTES), chain[index - 1].key if index else ROOT
            if place is None:
                raise RuntimeError("the slab is too small for what it was made for")
            block = RecordId(RecordKind.BLOCK, name.key)
            tier.admit(Record(block, IDENTITY, name.tokens, parent, place, BLOCK_BYTES, EXTENTS), Arrival(CHAIN))
    return Tiers(tier, None, lambda: 0.0)


def _cold(chains: Chains) -> Tiers:
    """All blocks on disk, none in DRAM."""
    nvme = NvmeTier(MemorySegments(), 2 * BLOCKS * PAGE, lambda: 0.0, BLOCK_BYTES)
    _fill(nvme._index, chains)
    return Tiers(DramTier(BLOCK_BYTES, lambda: 0.0, WarmWindow()), nvme, lambda: 0.0)


def _fill(index: SegmentIndex, chains: Chains) -> None:
    at = 0
    for chain in chains:
        for step, name in enumerate(chain):
            parent = chain[step - 1].key if step else ROOT
            block = RecordId(RecordKind.BLOCK, name.key)
            stored = Stored(block, IDENTITY, name.tokens, parent, BLOCK_BYTES, EXTENTS, 0.0)
            index.add(stored, Place(at // SEGMENT, at % SEGMENT * PAGE, PAGE), 0.0, Arrival(CHAIN))
            at += 1


def _order(ids: Sequence[Sequence[RecordId]]) -> EvictionOrder[RecordId]:
    order: EvictionOrder[RecordId] = EvictionOrder(sample, Budgets(0, 0))
    for now, chain in enumerate(ids):
        for index, record in enumerate(chain):
            order.add(record, chain[index - 1] if index else None, float(now), Arrival(CHAIN))
    return order


def _touched(order: EvictionOrder[RecordId], ids: Sequence[Sequence[RecordId]]) -> Ask:
    """Ids are made beforehand: in the tiers, records have theirs."""
    chains = {chain[0].key: chain for chain in ids}
    times = itertools.count(float(CHAINS))
    return lambda names, identity: order.touch(chains[names[0].key], next(times))


def _collected(tiers: Tiers) -> Ask:
    return lambda names, identity: tiers.use(tiers.collect(names, identity, anchor=False))


def _measured(build: Callable[[], T]) -> tuple[T, int]:
    """What was built, and the bytes that it keeps."""
    tracemalloc.start()
    try:
        built = build()
        return built, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def _rate(ask: Ask, chains: Chains) -> float:
    started, rounds = time.process_time(), 5
    for _ in range(rounds):
        for chain in chains:
            ask(chain, IDENTITY)
    return rounds * BLOCKS / (time.process_time() - started)
