"""The order tells how a record stands, and telling it changes nothing."""

from __future__ import annotations

from services.kvstore.eviction import EvictionOrder, Standing
from services.kvstore.policy.budget import Budgets, Owner

OWNER = Owner("ab" * 16)


def test_a_record_stands_by_when_it_came_was_used_and_what_is_promised() -> None:
    order: EvictionOrder[int] = EvictionOrder(lambda key: key, Budgets(100, 100))
    assert order.standing(1, 5.0) is None
    order.add(1, None, 10.0)
    order.add(2, None, 11.0)
    assert order.standing(1, 15.0) == Standing(5.0, 5.0, 0, None, 0.0)
    order.touch([1], 16.0)
    assert order.promise(1, OWNER, 10, 30.0, 16.0)
    for _ in range(2):  # asking is no use
        assert order.standing(1, 20.0) == Standing(10.0, 4.0, 1, OWNER, 26.0)
    assert order.standing(1, 50.0) == Standing(40.0, 34.0, 1, None, 0.0)  # the promise is over
    assert order.coldest(20.0, lambda key: True) == 2
