"""What layers make of a staged batch alone is made by the first of them."""

from __future__ import annotations

from itertools import count

from kernels.operands import CPU
from kernels.staging import once, staged
from kernels.testing.generator import ragged_of


def test_what_a_batch_becomes_is_made_once_for_each_name_and_by_no_other_batch() -> None:
    first, second = (staged(ragged_of(((5, 1),), 16, ()), CPU) for _ in range(2))
    numbers = count()

    def made() -> tuple[int]:
        return (next(numbers),)

    assert [once(first, ("window", 12), made)[0] for _ in range(3)] == [0, 0, 0]
    assert once(first, ("window", 16), made) == (1,)
    assert once(second, ("window", 12), made) == (2,)
    assert once(first, ("window", 12), made) == (0,)
