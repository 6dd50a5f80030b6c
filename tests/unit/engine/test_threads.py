"""Few rows are computed by one thread or by all, whichever is faster now; many rows by all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from engine.threads import FEW_ROWS, ThreadChoice, run, use
from tests.support.clock import FakeClock


def steps(
    choice: ThreadChoice, rows: int, seconds: Callable[[int], float], number: int = 200, most: int = 2
) -> Counter[int]:
    used: Counter[int] = Counter()
    for _ in range(number):
        threads = choice.of(rows, most)
        choice.took(rows, threads, seconds(threads))
        used[threads] += 1
    return used


@pytest.mark.parametrize("fast", [1, 4])
def test_the_faster_count_is_used_and_the_other_one_tried_now_and_then(fast: int) -> None:
    used = steps(ThreadChoice(), 32, lambda threads: 1.0 if threads == fast else 3.0, most=4)
    assert used[fast] >= 190 and used[5 - fast] >= 4 and used[1] + used[4] == 200


def test_what_was_slower_is_used_once_it_is_faster() -> None:
    choice = ThreadChoice()
    steps(choice, 8, lambda threads: threads)
    steps(choice, 8, lambda threads: 1 / threads, 64 * 8)
    assert steps(choice, 8, lambda threads: 1 / threads)[2] >= 190


def test_one_late_step_changes_nothing() -> None:
    choice = ThreadChoice()
    steps(choice, 8, lambda threads: threads)
    choice.took(8, 1, 100.0)
    assert choice.of(8, 2) == 1


def test_sizes_are_judged_apart_and_many_rows_take_all() -> None:
    choice = ThreadChoice()
    steps(choice, 1, lambda threads: 1 / threads)
    steps(choice, 32, lambda threads: threads)
    assert (choice.of(1, 2), choice.of(32, 2), choice.of(FEW_ROWS + 1, 2)) == (2, 1, 2)


def test_where_there_is_one_thread_there_is_no_choice() -> None:
    assert steps(ThreadChoice(), 8, lambda threads: 1.0, most=1) == {1: 200}


def test_a_step_runs_with_the_chosen_threads_and_leaves_the_callers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    most, seen, clock = torch.get_num_threads(), [], FakeClock()
    choice = ThreadChoice()
    monkeypatch.setattr(choice, "of", lambda rows, most: most + 1)

    def work() -> str:
        seen.append(torch.get_num_threads())
        clock.advance(2.0)
        return "done"

    assert run(choice, 8, clock, work) == "done"
    assert seen == [most + 1] and torch.get_num_threads() == most
    with pytest.raises(ValueError, match="no"):
        run(choice, 8, clock, lambda: (_ for _ in ()).throw(ValueError("no")))
    assert torch.get_num_threads() == most


@pytest.mark.parametrize(("device", "used"), [("cpu", []), ("cuda", []), ("cuda:1", [torch.device("cuda:1")])])
def test_a_numbered_gpu_becomes_the_threads_own(
    device: str, used: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    use(torch.device(device))
    assert found == used
