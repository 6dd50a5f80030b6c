"""The best keys by index score: their definition, the selection run on the CPU, the kernel compiled for GPUs."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cuda.driver import has_nvrtc
from kernels.cuda.indexer_top_k import MOST_CHOSEN, Plan, compile_for, plan_of, room_of, shared_bytes
from kernels.errors import KernelError
from kernels.reference.indexer_top_k import best_of, indexer_top_k
from kernels.reference.mqa_logits import mqa_logits
from kernels.reference.top_k import top_k
from kernels.testing import indexer_top_k as testing
from kernels.testing.emulated import EmulatedKernel, has_compiler
from kernels.testing.mqa_logits import make_hostile, make_paged, make_ragged
from kernels.testing.top_k import HOSTILE, make_scores

CPU = torch.device("cpu")
PLANS = [
    Plan(64, 2, False, 6, 1, 0),
    Plan(64, 1, True, 12, 2, 64, joined=True),
]


class Selecting(ctypes.Structure):
    """Parameters of the kernel for tests."""

    _fields_ = [("scores", ctypes.c_void_p), ("indices", ctypes.c_void_p), ("columns", ctypes.c_int),
                ("count", ctypes.c_int), ("first", ctypes.c_int)]  # fmt: skip


def test_the_best_keys_of_a_token_are_those_of_its_scores() -> None:
    given = make_ragged(9, 300, 64, CPU, 1)
    found = indexer_top_k(given, 300, 20)
    scores = mqa_logits(given, 300)
    assert torch.equal(found, top_k(scores, 20, given.ends))
    assert torch.equal(found, indexer_top_k(given, 300, 20, torch.float64)), "no two scores are closer than fp32"


def test_a_token_chooses_between_its_bounds_and_the_lower_index_of_equal_scores() -> None:
    given = make_ragged(4, 40, 16, CPU, 2)
    given = replace(given, weights=torch.zeros(4, 16), starts=torch.tensor([0, 5, 36, 40]).int())
    assert indexer_top_k(given, 40, 3).tolist() == [[0, 1, 2], [5, 6, 7], [36, 37, 38], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("team", "room", "columns", "count", "first", "kinds"),
    [
        (128, 512, 3, 5, 0, HOSTILE),
        (128, 512, 2000, 200, 1_000_000, HOSTILE),
        (256, 1024, 5000, 32, 64, HOSTILE),
        (256, 8192, 9000, 2048, 7, ("few", "nan")),
        (256, 8192, 34_000, 2048, 0, ("normal",)),  # more keys than the map of chosen ones has at a time
    ],
)
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_selection_run_on_the_cpu_equals_the_definition(
    team: int, room: int, columns: int, count: int, first: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    source = Path(testing.__file__).with_name("indexer_candidates.cu")
    kernel = EmulatedKernel(source, "select_best", {"TEAM": team, "ROOM": room}, tmp_path)
    for kind in kinds:
        scores = make_scores(kind, 1, columns, CPU, columns)
        given, found = scores.contiguous(), torch.full((1, count), -7, dtype=torch.int32)
        kernel.launch(1, team, Selecting(given.data_ptr(), found.data_ptr(), columns, count, first))
        expected = top_k(scores, count)
        assert torch.equal(found, torch.where(expected < 0, expected, expected + first)), kind


def test_operands_no_kernel_takes_are_refused() -> None:
    given = make_ragged(4, 64, 64, CPU, 5)
    with pytest.raises(KernelError, match="0 of 64"):
        best_of(torch.zeros(4, 64), given, 0)
    with pytest.raises(KernelError, match="ends is"):
        indexer_top_k(replace(given, ends=given.ends.long()), 64, 3)


def test_plans_leave_room_for_candidates() -> None:
    assert plan_of(make_ragged(5, 64, 64, CPU, 6)) == PLANS[0]
    assert plan_of(make_paged(torch.tensor([5, 70]), 1, 64, 64, CPU, 6)[0]) == PLANS[1]
    for heads in (16, 32, 64):
        for tokens in (1, 2, 3):
            plan = plan_of(make_paged(torch.tensor([5, 70]), tokens, heads, 61, CPU, 6)[0])
            assert shared_bytes(plan) <= 232_448 - 1024 and room_of(plan) >= 2 * MOST_CHOSEN


def test_hostile_operands_have_equal_scores() -> None:
    scores = mqa_logits(make_hostile(make_ragged(6, 90, 64, CPU, 7)), 90)
    assert len(scores[5].unique()) < 30


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_without_spills(plan: Plan) -> None:
    cubin, report = compile_for(plan)
    assert cubin
    assert "0 bytes spill stores" in report
