"""Backoff of processes that end."""

import pytest

from cli.restarts import RestartPolicy, Restarts

POLICY = RestartPolicy(first_delay_s=1, longest_delay_s=4, stable_after_s=30, start_limit=2, crash_limit=5)


def test_delays_double_up_to_the_longest_and_end_in_a_crash_loop():
    restarts = Restarts(POLICY)
    assert [restarts.delay_s(1.0, served_before=True) for _ in range(5)] == [1, 2, 4, 4, None]


def test_a_process_that_never_served_gets_one_more_try_only():
    restarts = Restarts(POLICY)
    assert [restarts.delay_s(None, served_before=False) for _ in range(2)] == [1, None]


@pytest.mark.parametrize(("served_s", "expected"), [(29.9, 2), (30.0, 1)])
def test_a_run_that_served_long_enough_clears_the_history(served_s, expected):
    restarts = Restarts(POLICY)
    restarts.delay_s(1.0, served_before=True)
    assert restarts.delay_s(served_s, served_before=True) == expected
