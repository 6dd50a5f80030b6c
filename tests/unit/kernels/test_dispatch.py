"""Dispatch and combine: plans and sums against their definition, and rounds of one process and of two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from kernels.dispatch import Alone, Dispatcher, make_plan
from kernels.errors import KernelError
from kernels.reference.dispatch import OPS, combine, plan
from kernels.testing.dispatch import check_permutation, check_round, run_rank

CPU = torch.device("cpu")


def test_a_plan_keeps_the_order_of_rows_within_a_group() -> None:
    chosen = torch.tensor([[2, 0], [-1, 2], [0, 1], [2, -1]], dtype=torch.int32)
    found = make_plan(4, 2, 3, 8 + 3 * 3, CPU)
    plan(chosen, 0, 4, found)
    assert found.counts.tolist() == [2, 1, 3]
    assert found.offsets.tolist() == [0, 4, 8, 12]
    assert found.sources[:12].tolist() == [1, 4, -1, -1, 5, -1, -1, -1, 0, 3, 6, -1]
    assert found.places.tolist() == [[8, 0], [-1, 9], [1, 4], [10, -1]]


def test_rows_are_copied_and_summed_back() -> None:
    check_permutation(OPS, CPU, 19, 3, 5, 128)


def test_one_process_is_a_round() -> None:
    check_round(OPS, Alone(), CPU, 9, 128)


def test_two_processes_are_a_round(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (2, tmp_path, 6), 2)


def test_what_has_no_room_is_refused() -> None:
    chosen = torch.zeros(4, 2, dtype=torch.int32)
    for slots, capacity, alignment in ((7, 0, 1), (40, 3, 0), (40, 0, 0)):
        with pytest.raises(KernelError):
            plan(chosen, capacity, alignment, make_plan(4, 2, 3, slots, CPU))
    dispatcher = Dispatcher(OPS, Alone(), 4, 2, 3, ((torch.bfloat16, 64),), 64, CPU)
    with pytest.raises(KernelError, match="at most 3"):
        dispatcher.dispatch((torch.zeros(4, 64, dtype=torch.bfloat16),), chosen, torch.zeros(4, 2))
    with pytest.raises(KernelError, match="columns"):
        rows = torch.zeros(4, 63, dtype=torch.bfloat16)
        combine(rows, chosen, None, None, rows)
