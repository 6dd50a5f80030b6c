"""The eviction order learns what is used again, lets leaves go first and keeps promises without ever wedging."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fabric.retention import RetentionClass
from services.kvstore.eviction import EvictionOrder
from services.kvstore.policy.budget import Budgets, Owner
from services.kvstore.policy.ghosts import Ghosts
from services.kvstore.policy.retention import KEEP_S
from services.kvstore.policy.traits import Arrival

SIZE, ROOM = 10, 12
OWNERS = (Owner("a"), Owner("b", RetentionClass.CHAT))
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "promise", "evict", "expire"]), st.integers(0, 40), st.floats(0, 400)),
    max_size=120,
)


def order(idle_s: float = 1000.0) -> EvictionOrder[int]:
    return EvictionOrder(lambda key: key * 2654435761 >> 7 & 0xFFFF, Budgets(3 * SIZE, 5 * SIZE), idle_s)


def everything(key: int) -> bool:
    return True


def parent_of(key: int) -> int | None:
    """A binary tree: 1 is the root of all."""
    return key // 2 or None


def drive(steps: Sequence[tuple[str, int, float]]) -> list[int]:
    """Applies the steps to an order of at most ROOM keys and checks its promises after each; what left, in order."""
    evictions, now = order(), 0.0
    held: set[int] = set()
    left: list[int] = []

    def leave(key: int) -> None:
        assert not {2 * key, 2 * key + 1} & held, "an inner record left before what continues it"
        evictions.remove(key, now)
        held.remove(key)
        left.append(key)

    for step, key, passed_s in steps:
        now += passed_s
        path = [key >> shift for shift in range(key.bit_length() - 1, -1, -1)]
        if step == "add" and key and key not in held and (parent_of(key) is None or parent_of(key) in held):
            if len(held) == ROOM:
                coldest = evictions.coldest(now, lambda other, path=path: other not in path)  # type: ignore[misc]
                assert coldest is not None, "nothing could leave although nothing is pinned"
                leave(coldest)
            evictions.add(key, parent_of(key), now, Arrival(key))
            held.add(key)
        elif step == "touch" and key in held:
            evictions.touch(path, now)
        elif step == "promise" and key in held:
            evictions.promise(key, OWNERS[key % 2], SIZE, passed_s + 1, now)
        elif step == "evict" and held:
            coldest = evictions.coldest(now, everything)
            assert coldest is not None
            leave(coldest)
        elif step == "expire":
            for expired in evictions.expired(now):
                leave(expired)
        assert len(evictions) == len(held) and all(other in evictions for other in held)
        assert evictions.promised_bytes(now) <= min(5, len(held)) * SIZE
    return left


@given(STEPS)
def test_every_record_is_either_here_or_left_and_leaves_go_first(steps: list[tuple[str, int, float]]) -> None:
    drive(steps)


@given(STEPS)
def test_equal_calls_at_equal_times_give_equal_evictions(steps: list[tuple[str, int, float]]) -> None:
    assert drive(steps) == drive(steps)


@given(st.sets(st.integers(1, 30), min_size=1))
def test_promises_to_all_never_keep_the_last_record_from_leaving(keys: set[int]) -> None:
    evictions = EvictionOrder[int](lambda key: key, Budgets(1000, 1000))
    for key in keys:
        evictions.add(key, None, 0.0)
        assert evictions.promise(key, OWNERS[0], SIZE, 1e6, 0.0)
    for _ in keys:
        coldest = evictions.coldest(1.0, everything)
        assert coldest is not None
        evictions.remove(coldest, 1.0)
    assert len(evictions) == 0
    assert evictions.promised_bytes(1.0) == 0


def test_an_untaught_order_is_least_recently_used() -> None:
    evictions = order()
    for key in range(1, 5):
        evictions.add(key, None, 100.0 * key)
    evictions.touch([1], 450.0)
    left = []
    while (coldest := evictions.coldest(500.0, everything)) is not None:
        left.append(coldest)
        evictions.remove(coldest, 500.0)
    assert left == [2, 3, 4, 1]


def test_what_is_pinned_is_never_named() -> None:
    evictions = order()
    evictions.add(1, None, 0.0)
    evictions.add(2, 1, 0.0)
    assert evictions.coldest(1.0, lambda key: key != 2) is None  # 1 is no leaf, 2 is pinned
    assert evictions.coldest(1.0, everything) == 2


def test_a_hit_starts_a_promise_anew_and_its_end_frees_the_budget() -> None:
    evictions = order()
    evictions.add(1, None, 0.0)
    assert evictions.promise(1, OWNERS[0], SIZE, 60.0, 0.0)
    evictions.touch([1], 50.0)
    assert evictions.promised_bytes(100.0) == SIZE
    assert evictions.promised_bytes(110.0) == 0


def promised(evictions: EvictionOrder[int], *keys: int) -> set[int]:
    found = {key: evictions.standing(key, 0.0) for key in keys}
    return {key for key, standing in found.items() if standing is not None and standing.owner is not None}


def test_a_full_budget_keeps_what_its_owner_used_last_and_takes_nothing_from_others() -> None:
    evictions = order()
    for key in range(1, 7):
        evictions.add(key, None, 0.0)
    assert evictions.promise(6, OWNERS[1], SIZE, 9.0, 0.0)
    assert all(evictions.promise(key, OWNERS[0], SIZE, 9.0, 0.0) for key in (1, 2, 3))
    evictions.touch([1], 0.0)
    assert evictions.promise(4, OWNERS[0], SIZE, 9.0, 0.0)
    assert promised(evictions, *range(1, 7)) == {1, 3, 4, 6}
    assert not evictions.promise(5, OWNERS[0], 4 * SIZE, 9.0, 0.0), "larger than the budget: nobody gives way"
    assert promised(evictions, *range(1, 7)) == {1, 3, 4, 6}


def test_where_all_budgets_together_are_full_the_longest_unused_promise_of_anybody_ends() -> None:
    evictions = order()
    for key in range(1, 7):
        evictions.add(key, None, 0.0)
    assert all(evictions.promise(key, OWNERS[0], SIZE, 9.0, 0.0) for key in (1, 2, 3))
    assert all(evictions.promise(key, OWNERS[1], SIZE, 9.0, 0.0) for key in (4, 5, 6))
    assert promised(evictions, *range(1, 7)) == {2, 3, 4, 5, 6}
    assert evictions.promised_bytes(0.0) == 5 * SIZE


def test_of_a_prefix_beyond_the_budget_the_start_stays_promised() -> None:
    evictions = order()
    for key in range(1, 6):
        evictions.add(key, key - 1 or None, 0.0)
    for key in range(5, 0, -1):
        evictions.promise(key, OWNERS[0], SIZE, 9.0, 0.0)
    assert promised(evictions, *range(1, 6)) == {1, 2, 3}
    evictions.touch(range(1, 6), 0.0)
    assert evictions.promise(5, OWNERS[0], SIZE, 9.0, 0.0)
    assert promised(evictions, *range(1, 6)) == {1, 2, 5}


def test_promises_that_come_and_go_leave_nothing_behind() -> None:
    evictions = order()
    for key in range(4):
        evictions.add(key, None, 0.0)
    for turn in range(1000):
        evictions.promise(turn % 4, OWNERS[0], SIZE, 1e6, 0.0)
    assert len(evictions._ends) <= 2 * 4 + 64
    assert evictions.promised_bytes(0.0) == 3 * SIZE


def test_idle_records_expire_leaves_first_and_a_hit_starts_their_time_anew() -> None:
    keep_s = KEEP_S[RetentionClass.DEFAULT]
    evictions = order(keep_s)
    evictions.add(1, None, 0.0)
    evictions.add(2, 1, 0.0)
    evictions.add(3, None, 0.0)
    evictions.touch([3], 10.0)
    assert evictions.expired(keep_s - 1) == []
    assert evictions.expired(keep_s) == [2]
    evictions.remove(2, keep_s)
    assert evictions.expired(keep_s) == [1]  # at once: nothing here continues it any more
    assert evictions.expired(keep_s + 10) == [3]


def test_records_of_each_class_expire_at_their_own_time_and_promised_ones_when_the_promise_ends() -> None:
    evictions = order()
    for key, retention in enumerate(RetentionClass):
        evictions.add(key, None, 0.0, idle_s=KEEP_S[retention])
    assert evictions.promise(0, OWNERS[0], SIZE, 100 * 3600.0, 0.0)
    assert evictions.expired(72 * 3600.0) == [list(RetentionClass).index(RetentionClass.AGENT)]  # 3 days, as DEFAULT
    assert sorted(evictions.expired(100 * 3600.0)) == [0, 2]  # what is named and stays, is named again a minute later
    assert sorted(evictions.expired(7 * 24 * 3600.0)) == [0, 1, 2]


def test_what_is_restored_is_as_old_as_it_was_and_taught_nothing() -> None:
    evictions = order(1000.0)
    evictions.restore(1, None, 0.0, 900.0)
    evictions.restore(2, 1, 500.0, 900.0)
    evictions.add(3, None, 900.0)
    assert evictions.used_s(1) == 0.0 and evictions.parent(2) == 1
    assert evictions.coldest(901.0, everything) == 2  # untaught: the oldest of those that nothing continues
    assert evictions.expired(1499.0) == [] and evictions.expired(1500.0) == [2]
    evictions.remove(2, 1500.0)
    assert evictions.expired(1500.0) == [1]


def test_an_arrival_is_the_same_after_it_was_an_index() -> None:
    for arrival in (Arrival(1), Arrival(40, continues=True), Arrival(7, last=True), Arrival(1000)):
        assert Arrival.of(arrival.index).index == arrival.index


def test_prompts_used_once_do_not_flush_a_prefix_that_is_used_again_and_again() -> None:
    evictions, now, room = order(1e9), 0.0, 50
    reused = list(range(1, 21))
    hits: list[int] = []

    def offer(key: int, parent: int | None, run: int) -> None:
        if len(evictions) >= room:
            if not evictions.admits(key, Arrival(run), now, everything):
                return
            coldest = evictions.coldest(now, lambda other: other not in reused)
            assert coldest is not None
            evictions.remove(coldest, now)
        evictions.add(key, parent, now, Arrival(run))

    for fresh in range(1000, 5000):
        now += 1.0
        if fresh % 60 == 0:  # 59 others in between: more than an LRU cache of 50 can hold beside it
            held = [key for key in reused if key in evictions]
            hits.append(len(held))
            evictions.touch(held, now)
            for key in reused[len(held) :]:
                if key == 1 or key - 1 in evictions:
                    offer(key, key - 1 or None, 20)
        offer(fresh, None, 1)
    assert hits[0] == 0
    assert min(hits[-20:]) == len(reused)


def test_what_left_or_was_refused_comes_back_as_used_until_it_is_forgotten() -> None:
    ghosts = Ghosts[int](most=2)
    assert ghosts.recall(1, Arrival(5)) == (0, Arrival(5).index)
    ghosts.keep(1, 0, Arrival(5).index)
    assert ghosts.recall(1, Arrival(99)) == (1, Arrival(5).index)
    ghosts.keep(2, 0, 0)
    ghosts.keep(3, 0, 0)
    assert len(ghosts) == 2
    assert ghosts.recall(1, Arrival(5))[0] == 0


def test_the_oldest_is_named_even_where_others_continue_it_and_never_what_is_pinned() -> None:
    evictions = order()
    evictions.add(1, None, 0.0)
    evictions.add(2, 1, 0.0)
    evictions.add(3, 2, 0.0)
    evictions.touch([1], 5.0)
    assert evictions.coldest(6.0, lambda key: key != 3) is None
    assert evictions.oldest(lambda key: key != 3) == 2 and evictions.oldest(lambda key: False) is None
