"""Exact top-k by index: its definition, and the CUDA source run on the CPU and compiled for GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.cuda.driver import has_nvrtc
from kernels.cuda.top_k import SOURCE, THREADS, Plan, compile_for, defines_for, parameters_of, plan_of
from kernels.errors import KernelError
from kernels.reference.top_k import top_k
from kernels.testing.emulated import EmulatedKernel, has_compiler
from kernels.testing.top_k import HOSTILE, assert_top_k, make_lengths, make_scores

CPU = torch.device("cpu")
INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("row", "count", "expected"),
    [
        ([1.0, 3.0, 2.0], 2, [1, 2]),
        ([5.0, 5.0, 5.0, 5.0], 2, [0, 1]),
        ([-0.0, 0.0, -1.0, 0.0], 2, [0, 1]),
        ([INFINITY, 1.0, NAN, -INFINITY], 1, [2]),
        ([INFINITY, 1.0, NAN, -INFINITY], 3, [0, 1, 2]),
        ([-INFINITY, -2.0], 4, [0, 1, -1, -1]),
    ],
)
def test_the_lower_index_of_equal_scores_is_chosen(row: list[float], count: int, expected: list[int]) -> None:
    assert top_k(torch.tensor([row + [9.0] * (-len(row) % 4)]), count, torch.tensor([len(row)]).int()).tolist() == [
        expected
    ]


def test_definition_is_torch_topk_where_no_scores_are_equal() -> None:
    scores = make_scores("normal", 5, 1000, CPU, 1)
    assert torch.equal(top_k(scores, 37).long(), scores.topk(37).indices.sort(1).values)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plan], EmulatedKernel]:
    """The source compiled for the CPU, once for all plans with the same macros."""
    made: dict[str, EmulatedKernel] = {}

    def build(plan: Plan) -> EmulatedKernel:
        defines = defines_for(plan)
        name = f"{defines} {plan.cluster}"
        if name not in made:
            made[name] = EmulatedKernel(SOURCE, "top_k", defines, tmp_path_factory.mktemp("top_k"), plan.cluster)
        return made[name]

    return build


@pytest.mark.parametrize(
    ("columns", "plan"),
    [
        (5, Plan(1, 8)),
        (8190, Plan(1, 8)),
        (9000, Plan(1, 16, 2)),
        (20_000, Plan(1, 32)),
        (66_000, Plan(1, 128)),
        (5, Plan(2, 8)),
        (16_300, Plan(2, 8)),
        (30_001, Plan(4, 8)),
        (140_000, Plan(2, 128)),
    ],
)
@pytest.mark.skipif(not has_compiler(), reason="needs g++")
def test_source_run_on_the_cpu_equals_the_definition(
    columns: int, plan: Plan, emulated: Callable[[Plan], EmulatedKernel]
) -> None:
    kernel = emulated(plan)

    def run(scores: torch.Tensor, lengths: torch.Tensor | None, indices: torch.Tensor) -> None:
        kernel.launch(scores.shape[0] * plan.cluster, THREADS, parameters_of(scores, lengths, indices))

    for kind in HOSTILE:  # once each: emulated threads take the same turns in every run
        assert_top_k(make_scores(kind, 1, columns, CPU, columns), 301, None, run, turns=1)
    for count in (1, 2048):
        assert_top_k(make_scores("few", 7, columns, CPU, 3), count, make_lengths(7, columns, CPU), run, turns=1)


def test_operands_no_kernel_takes_are_refused() -> None:
    scores = torch.zeros(3, 8)
    indices = torch.zeros(3, 2, dtype=torch.int32)
    wrong = [
        (scores.double(), None, indices, "scores is"),
        (scores[:, ::2], None, indices, "scores is"),
        (torch.zeros(3, 7), None, indices, "rows of 7"),
        (scores, torch.zeros(3), indices, "lengths is"),
        (scores, None, indices.long(), "indices is"),
        (scores, None, indices[:2], "indices is"),
        (scores, None, indices[:, :0], "count is 0"),
    ]
    for *operands, reason in wrong:
        with pytest.raises(KernelError, match=reason):
            parameters_of(*operands)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "columns", "plan"),
    [
        (64, 32_768, Plan(2, 16)),
        (4096, 65_536, Plan(1, 64)),
        (1, 131_072, Plan(8, 16)),
        (64, 131_072, Plan(2, 64)),
        (1, 300, Plan(1, 8)),
        (4096, 8192, Plan(1, 8, 2)),
        (100, 16_384, Plan(1, 16)),
        (4096, 1 << 20, Plan(8, 128)),
    ],
)
def test_blocks_share_a_row_while_multiprocessors_are_idle_or_memory_is_short(
    rows: int, columns: int, plan: Plan
) -> None:
    assert plan_of(rows, columns, 132) == plan


@pytest.mark.parametrize("plan", [Plan(1, 8), Plan(1, 16, 2), Plan(1, 128), Plan(2, 64), Plan(8, 128)])
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_without_spills(plan: Plan, architecture: str) -> None:
    cubin, report = compile_for(plan, architecture)
    assert cubin
    assert "0 bytes spill stores" in report
