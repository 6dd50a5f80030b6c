"""Routing: the prefix pulls, load pushes, and neither wins for ever."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from engine.prefix import PrefixIdentity, block_keys
from fabric.errors import Unavailable
from services.gateway.mirror import Knowledge
from services.gateway.router import Demand, Router, Worker

PROMPT = tuple(range(1024))
DEMAND = Demand("m", PROMPT, 1100, b"salt")


def worker(key: str, **fields: object) -> Worker:
    base = Worker(key, "m", "rev", "layout", "records", 128, 8192, max_requests=16, blocks_free=1000)
    return replace(base, **fields)  # type: ignore[arg-type]


def keys(salt: bytes = b"salt") -> frozenset[bytes]:
    return frozenset(block_keys(salt, PROMPT, PrefixIdentity("rev", "layout", "exact", 128)))


def pick(prefills: list[Worker], decodes: list[Worker], demand: Demand = DEMAND, seed: int = 0) -> tuple[str, str, int]:
    pair = Router(Random(seed)).pick(demand, prefills, decodes)
    return pair.prefill, pair.decode, pair.hit_tokens


def test_the_worker_that_holds_the_prefix_gets_the_request() -> None:
    assert pick([worker("p1"), worker("p2", held=keys())], [worker("d")]) == ("p2", "d", 1024)


def test_what_may_not_be_held_any_more_counts_half() -> None:
    degraded = worker("p2", held=keys(), knowledge=Knowledge.DEGRADED)
    assert pick([worker("p1"), degraded], [worker("d")]) == ("p2", "d", 512)
    assert pick([worker("p1", held=keys()), degraded], [worker("d")]) == ("p1", "d", 1024)
    assert pick([worker("p1"), replace(degraded, queued_tokens=700)], [worker("d")])[0] == "p1"


def test_another_tenants_prefix_is_no_hit() -> None:
    assert pick([worker("p", held=keys(b"other"))], [worker("d")])[2] == 0


def test_a_hit_is_the_leading_blocks_only() -> None:
    held = sorted(keys(), key=list(block_keys(b"salt", PROMPT, PrefixIdentity("rev", "layout", "exact", 128))).index)
    assert pick([worker("p", held=frozenset(held[:3] + held[5:]))], [worker("d")])[2] == 384


def test_a_worker_that_replays_windows_keys_its_blocks_by_that() -> None:
    replayed = frozenset(block_keys(b"salt", PROMPT, PrefixIdentity("rev", "layout", "replay", 128)))
    assert pick([worker("p", held=replayed, window_policy="replay")], [worker("d")])[2] == 1024
    assert pick([worker("p", held=replayed)], [worker("d")])[2] == 0


def test_without_cache_the_prefix_does_not_count() -> None:
    assert pick([worker("p", held=keys())], [worker("d")], replace(DEMAND, use_cache=False))[2] == 0


def test_a_long_queue_outweighs_a_whole_hit() -> None:
    assert pick([worker("p1", held=keys(), queued_tokens=3000), worker("p2")], [worker("d")])[0] == "p2"


def test_work_sent_but_not_reported_counts() -> None:
    assert pick([worker("p1", sent_tokens=1024), worker("p2")], [worker("d")])[0] == "p2"


def test_recent_work_outweighs_a_small_shared_prefix() -> None:
    first = frozenset([block_keys(b"salt", PROMPT, PrefixIdentity("rev", "layout", "exact", 128))[0]])
    assert pick([worker("p1", held=first, recent_tokens=3000.0), worker("p2")], [worker("d")])[0] == "p2"


def test_equal_workers_share_by_chance() -> None:
    seen = Counter(
        pick([worker("p1"), worker("p2")], [worker("d1"), worker("d2")], seed=seed)[:2] for seed in range(80)
    )
    assert len(seen) == 4 and min(seen.values()) >= 8


def test_the_emptier_decode_gets_the_request() -> None:
    assert pick([worker("p")], [worker("d1", requests=8), worker("d2", requests=2)])[1] == "d2"


def test_a_decode_without_free_blocks_comes_last() -> None:
    assert pick([worker("p")], [worker("d1", blocks_free=2), worker("d2", requests=12)])[1] == "d2"


def test_only_pairs_of_one_revision_and_layout_are_made() -> None:
    assert pick([worker("p1", revision="old"), worker("p2")], [worker("d1"), worker("d2", revision="new")])[:2] == (
        "p2",
        "d1",
    )


@pytest.mark.parametrize(
    ("prefills", "decodes", "says"),
    [
        ([], [worker("d")], "no prefill worker"),
        ([worker("p")], [], "no decode worker"),
        ([], [], "no prefill and decode worker"),
        ([worker("p", max_tokens=10)], [worker("d")], "no prefill worker"),
        ([worker("p")], [worker("d", max_tokens=1050)], "no decode worker"),
        ([worker("p", model="other")], [worker("d")], "no prefill worker"),
        ([worker("p", revision="a")], [worker("d", revision="b")], "different revisions"),
    ],
)
def test_a_missing_side_is_named_with_a_fix(prefills: list[Worker], decodes: list[Worker], says: str) -> None:
    with pytest.raises(Unavailable) as caught:
        pick(prefills, decodes)
    assert says in caught.value.message and caught.value.fix and caught.value.retry_after_s
