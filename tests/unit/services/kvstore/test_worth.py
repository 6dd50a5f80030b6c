"""What a block is worth follows from when blocks of its kind were used again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.retention import RetentionClass
from services.kvstore.policy.ages import BINS, EDGES, age_bin, age_bins
from services.kvstore.policy.budget import Budgets, Owner
from services.kvstore.policy.monitor import ReuseMonitor
from services.kvstore.policy.retention import KEEP_S, WarmWindow
from services.kvstore.policy.traits import KINDS, Arrival, kind_of
from services.kvstore.policy.worth import chances, worths


def monitor(events: int = 64, recent: int = 64, horizon_s: float = 1e9) -> ReuseMonitor[int]:
    return ReuseMonitor(events, recent, horizon_s, lambda key: key)


def test_untaught_worth_falls_with_age_alone() -> None:
    nothing = np.zeros((KINDS, BINS))
    worth = worths(chances(nothing, nothing))
    assert (worth == worth[0]).all()
    assert (np.diff(worth[0, 1:]) < 0).all()


def test_worth_of_a_use_that_is_sure_is_one_over_its_time() -> None:
    chance = np.zeros((1, BINS))
    chance[0, 0] = 1.0
    assert worths(chance)[0, 0] == pytest.approx(1 / (EDGES[1] / 2))  # on average in the middle of the bin
    assert worths(chance)[0, 1:].max() == 0.0


def test_a_block_is_worth_more_shortly_before_the_age_at_which_its_kind_is_used() -> None:
    chance = np.zeros((1, BINS))
    chance[0, 10] = 0.5
    worth = worths(chance)[0]
    assert (np.diff(worth[:11]) > 0).all()
    assert worth[11:].max() == 0.0


@given(st.lists(st.floats(0, 1e7), min_size=1))
def test_ages_have_one_bin_each_alone_and_together(ages: list[float]) -> None:
    alone = [age_bin(age) for age in ages]
    assert all(EDGES[at] <= age for at, age in zip(alone, ages, strict=True))
    assert (np.abs(age_bins(np.array(ages)) - alone) <= 1).all()


def test_the_monitor_counts_a_use_at_its_age_and_a_block_in_every_bin_it_reached() -> None:
    seen = monitor()
    seen.used(1, 3, 0.0)
    seen.used(1, 5, EDGES[4])
    used, at_risk = seen.uses(EDGES[4])
    assert used.sum() == used[3, 4] == 1
    assert at_risk[3, : 4 + 1].tolist() == [1.0] * 5
    assert at_risk[3, 5:].sum() == 0


def test_the_monitor_forgets_what_is_older_than_the_recent_events() -> None:
    seen = monitor(recent=4)
    seen.used(1, 3, 0.0)
    seen.used(1, 3, 10.0)
    for key in range(2, 8):
        seen.used(key, 0, 100.0)
    assert seen.uses(100.0)[0].sum() == 0


def test_the_monitor_samples_fewer_keys_where_its_ring_is_short() -> None:
    seen = monitor(events=16, horizon_s=100.0)
    for key in range(200):
        seen.used(key, 0, 0.1 * key)
    before = seen.used(1, 0, 30.0)
    assert seen.used(1, 0, 30.0) == before, "an odd key is still in a sample that was halved"
    assert seen.used(0, 0, 30.0) == before + 1


@given(st.integers(0, 500), st.booleans(), st.booleans(), st.integers(0, 500))
def test_every_block_is_of_some_kind(run: int, continues: bool, last: bool, uses: int) -> None:
    assert 0 <= kind_of(uses, Arrival(run, continues, last).index) < KINDS


def test_budgets_are_per_owner_and_for_all() -> None:
    budgets, chat, agent = Budgets(10, 15), Owner("a", RetentionClass.CHAT), Owner("a", RetentionClass.AGENT)
    budgets.promise(chat, 10)
    assert not budgets.can_promise(chat, 1)
    assert budgets.can_promise(agent, 5) and not budgets.can_promise(agent, 6)
    with pytest.raises(ValueError, match="beyond the budget"):
        budgets.promise(agent, 6)
    with pytest.raises(ValueError, match="never promised"):
        budgets.end(agent, 1)
    budgets.end(chat, 10)
    assert budgets.promised == budgets.of(chat) == 0


def test_classes_are_kept_for_their_days_and_the_warm_window_is_hours() -> None:
    day_s = 24 * 3600.0
    assert [KEEP_S[name] / day_s for name in RetentionClass] == [3, 7, 3]
    with pytest.raises(ValueError, match="warm window"):
        WarmWindow(60.0)
