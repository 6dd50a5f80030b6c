"""Retries: how many there may be in all, and which failures deserve one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ServiceError,
    StaleTicket,
    Unauthenticated,
    Unavailable,
)
from services.gateway.recovery import Bounds, Recovery, RetryBudget, worth_it

ELSEWHERE = [Unavailable("x"), DataLoss("x"), StaleTicket("x"), Exhausted("x"), Cancelled("a worker that stops")]
NOWHERE = [
    Internal("x"), InvalidArgument("x"), NotFound("x"), PermissionDenied("x"), Unauthenticated("x"),
    Unavailable("x", retryable=False),
]  # fmt: skip
errors = st.sampled_from([*ELSEWHERE, *NOWHERE, DeadlineExceeded("x"), Exhausted("x", retry_after_s=0.5)])
plenty = RetryBudget(0.0, 0.0, 10**9, lambda: 0.0)


@given(
    st.floats(0, 1),
    st.floats(0, 5),
    st.integers(1, 20),
    st.lists(st.one_of(st.just("request"), st.just("retry"), st.floats(0, 10)), max_size=200),
)
def test_retries_never_exceed_their_share_the_floor_and_one_burst(
    share: float, floor_per_s: float, burst: int, events: list[str | float]
) -> None:
    now = [0.0]
    budget = RetryBudget(share, floor_per_s, burst, lambda: now[0])
    requests = granted = 0
    for event in events:
        if event == "request":
            requests += 1
            budget.request()
        elif event == "retry":
            granted += budget.spend()
        else:
            now[0] += float(event)
    assert granted <= burst + share * requests + floor_per_s * now[0] + 1e-6


def test_an_empty_budget_fills_with_requests_and_with_time() -> None:
    now = [0.0]
    budget = RetryBudget(0.25, 0.5, 2, lambda: now[0])
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.request()
    assert [budget.spend(), budget.spend()] == [True, False]
    now[0] = 2.0
    assert [budget.spend(), budget.spend()] == [True, False]


@pytest.mark.parametrize("error", ELSEWHERE)
def test_what_a_worker_caused_is_tried_elsewhere(error: ServiceError) -> None:
    assert worth_it(error, 60.0)


@pytest.mark.parametrize("error", NOWHERE)
def test_what_fails_anywhere_is_not_tried_again(error: ServiceError) -> None:
    assert not worth_it(error, 60.0)


def test_a_workers_own_deadline_is_its_failure_and_ours_is_the_end() -> None:
    assert worth_it(DeadlineExceeded("the push"), 60.0) and not worth_it(DeadlineExceeded("ours"), 0.05)


@given(st.lists(errors, max_size=60), st.booleans(), st.floats(0, 100), st.integers(0, 5), st.integers(0, 5))
def test_a_request_begins_anew_within_its_bounds_and_before_its_deadline(
    failures: list[ServiceError], begun: bool, left_s: float, moves: int, waits: int
) -> None:
    recovery = Recovery(plenty, Bounds(moves, waits), Random(1))
    pauses = [recovery.pause_s(error, begun, left_s) for error in failures]
    begins = [pause for pause in pauses if pause is not None]
    assert all(0.0 < pause < max(left_s, 1e-9) for pause in begins)
    assert len(begins) <= moves + (waits if begun else 0)
    for error, pause in zip(failures, pauses, strict=True):
        assert pause is None or worth_it(error, left_s)


def test_only_an_answer_under_way_waits_for_full_workers_and_that_costs_no_budget() -> None:
    full, empty = Exhausted("full", retry_after_s=0.5), RetryBudget(0.0, 0.0, 1, lambda: 0.0)
    assert empty.spend()
    waiting = Recovery(empty, Bounds(3, 2), Random(1))
    pauses = [waiting.pause_s(full, True, 60.0) for _ in range(3)]
    assert [pause is None for pause in pauses] == [False, False, True] and (pauses[0] or 0.0) >= 0.25
    opening = Recovery(plenty, Bounds(3, 2), Random(1))
    assert [opening.pause_s(full, False, 60.0) is None for _ in range(2)] == [False, True]
