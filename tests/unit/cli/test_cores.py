"""Division of cores among workers."""

import pytest

from cli import cores


@pytest.mark.parametrize(
    ("available", "prefill", "decode", "expected"),
    [
        (1, 1, 1, ((1,), (1,))),
        (2, 1, 1, ((1,), (1,))),
        (4, 1, 1, ((2,), (2,))),
        (6, 1, 1, ((3,), (2,))),
        (8, 1, 1, ((4,), (3,))),
        (8, 2, 2, ((2, 2), (2, 2))),
        (3, 2, 2, ((1, 1), (1, 1))),
    ],
)
def test_every_worker_has_a_thread_and_prefill_takes_the_rest(available, prefill, decode, expected):
    division = cores.divide(available, prefill, decode)
    assert (division.prefill, division.decode) == expected


@pytest.mark.parametrize("available", range(1, 33))
@pytest.mark.parametrize("workers", range(1, 5))
def test_cores_are_not_oversubscribed_while_every_worker_can_have_one(available, workers):
    division = cores.divide(available, workers, workers)
    threads = sum(division.prefill) + sum(division.decode)
    assert threads == max(2 * workers, available - (1 if available > 4 * workers else 0))


def test_idle_threads_do_not_spin():
    environment = cores.environment(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "passive"
