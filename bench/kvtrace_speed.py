"""How fast the index and the policy answer, and what they take per block. Real keys, no bytes of KV."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence

from bench.table import Row
from services.kvstore.eviction import EvictionOrder
from services.kvstore.policy.budget import Budgets
from services.kvstore.policy.traits import Arrival
from services.kvstore.records import RecordId, RecordKind

CHAINS, CHAIN = 200, 100
LOOKUPS_BAR = 200_000.0
Chains = Sequence[Sequence[RecordId]]


def speed_rows() -> list[Row]:
    """Lookups per CPU second of this process, with and without the policy told of each hit; bytes per block."""
    chance = random.Random(0)
    chains = [[RecordId(RecordKind.BLOCK, chance.randbytes(32)) for _ in range(CHAIN)] for _ in range(CHAINS)]
    tracemalloc.start()
    order = _filled(chains)
    taken = tracemalloc.get_traced_memory()[0] / (CHAINS * CHAIN)
    tracemalloc.stop()
    return [
        Row("index lookups", _rate(order, chains, used=False), "/s", LOOKUPS_BAR, ">="),
        Row("index lookups, each a use that the policy learns of", _rate(order, chains, True), "/s", LOOKUPS_BAR, ">="),
        Row("memory of index and policy, keys aside", taken, "B per block"),
    ]


def _filled(chains: Chains) -> EvictionOrder[RecordId]:
    order: EvictionOrder[RecordId] = EvictionOrder(
        lambda record: int.from_bytes(record.key[:2], "little"), Budgets(0, 0)
    )
    for now, chain in enumerate(chains):
        for index, record in enumerate(chain):
            order.add(record, chain[index - 1] if index else None, float(now), Arrival(CHAIN))
    return order


def _rate(order: EvictionOrder[RecordId], chains: Chains, used: bool) -> float:
    started, looked_up = time.process_time(), 0
    for round_ in range(5):
        for index, chain in enumerate(chains):
            held = [record for record in chain if record in order]
            if used:
                order.touch(held, CHAINS * (round_ + 1.0) + index)
            looked_up += len(chain)
    return looked_up / (time.process_time() - started)
