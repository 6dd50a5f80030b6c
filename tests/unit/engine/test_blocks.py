"""Block pool."""

import pytest

from engine.blocks import BlockPool
from engine.errors import Exhausted


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.take(3)
    with pytest.raises(Exhausted) as refusal:
        pool.take(2)
    assert (refusal.value.needed, refusal.value.free, pool.free) == (2, 1, 1)
    assert refusal.value.retryable


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert (pool.held, pool.free) == (1, 1)
    pool.release([block])
    assert (pool.held, pool.free) == (0, 2)


def test_a_retained_block_outlives_its_holder_until_forgotten() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.retain(block)
    pool.release([block])
    assert (pool.free, pool.cached, pool.held) == (1, 1, 0)
    pool.share([block])
    pool.forget(block)
    assert (pool.free, pool.cached, pool.held) == (1, 0, 1)
    pool.release([block])
    assert pool.free == 2
    pool.check()


def test_counts_never_go_negative() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release([block])
    for misuse in (lambda: pool.release([block]), lambda: pool.share([block]), lambda: pool.retain(block)):
        with pytest.raises(ValueError, match="kv blocks"):
            misuse()
    with pytest.raises(ValueError, match="not retained"):
        pool.forget(block)
    pool.check()
