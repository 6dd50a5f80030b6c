"""A newcomer is filled no faster than its rate, and whatever the size of one offer, it is filled in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.fill import Filling
from tests.support.clock import FakeClock

RATE = 1000.0
MOST = 5000


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(1, MOST)), max_size=60))
def test_no_stretch_of_time_brings_more_than_its_rate_and_one_offer(offers: list[tuple[float, int]]) -> None:
    clock = FakeClock(0.0)
    filling, taken = Filling(RATE, clock), [(0.0, 0)]
    for pause_s, size in offers:
        clock.advance(pause_s)
        if filling.takes(size):
            taken.append((clock(), size))
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            brought = sum(size for _, size in taken[first : last + 1])
            assert brought <= RATE * (taken[last][0] - taken[first][0]) + MOST + 1e-6
    assert filling.counts.filled_bytes == sum(size for _, size in taken)
    assert filling.counts.redirected == len(offers) - len(taken) + 1


def test_an_offer_larger_than_a_second_is_taken_and_paid_for_afterwards() -> None:
    clock = FakeClock()
    filling = Filling(RATE, clock)
    assert filling.takes(4000)
    clock.advance(3.9)
    assert not filling.takes(1)
    clock.advance(0.2)
    assert filling.takes(1)
