"""Index scores: their definition, and the CUDA source compiled for GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cuda.driver import has_nvrtc
from kernels.cuda.mqa_logits import Plan, compile_for, plan_of, scoring_bytes
from kernels.errors import KernelError
from kernels.reference.mqa_logits import IndexKeys, MqaOperands, mqa_logits
from kernels.testing.mqa_logits import assert_logits, make_hostile, make_paged, make_ragged

CPU = torch.device("cpu")
LENGTHS = torch.tensor([130, 0, 1, 64, 65, 300])
MANY = Plan(64, 4, False, 8, 2, 0, warpgroups=2, buffers=1)
FEW = Plan(64, 1, True, 9, 2, 64, warpgroups=3, buffers=1, joined=True)


def run_reference(given: MqaOperands, logits: torch.Tensor) -> None:
    found = mqa_logits(given, logits.shape[1])
    logits.copy_(torch.where(found == -torch.inf, logits, found))


@pytest.mark.parametrize("heads", [16, 32, 64])
def test_reference_in_fp32_is_the_reference_in_fp64(heads: int) -> None:
    assert_logits(make_ragged(21, 300, heads, CPU, 1), 300, run_reference)
    for page_tokens in (1, 61, 64, 576):
        assert_logits(*make_paged(LENGTHS, 3, heads, page_tokens, CPU, 2), run_reference)


def test_reference_has_infinities_and_nan_where_its_operands_have_them() -> None:
    given = make_hostile(make_ragged(40, 200, 64, CPU, 3))
    found = mqa_logits(given, 200)
    assert bool(found[3, 3:30:17].isnan().all()), "a key's NaN is a score's"
    assert bool((found[11] == -torch.inf).all()), "a token that sees nothing has no score"


def test_one_score_by_hand() -> None:
    queries = torch.zeros(1, 16, 128)
    queries[0, 0, 0], queries[0, 1, 0], queries[0, 2, 1] = 2, -3, 4
    keys = torch.zeros(1, 2, 128)
    keys[0, 1, 0], keys[0, 1, 1] = 1.5, 1
    weights = torch.zeros(1, 16)
    weights[0, :3] = torch.tensor([1.0, 10.0, -0.5])
    given = MqaOperands(queries.to(torch.float8_e4m3fn), weights,
                        IndexKeys(keys.to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0]])),
                        torch.tensor([2]).int())  # fmt: skip
    assert mqa_logits(given, 2).tolist() == [[0.0, 2 * (3 - 2)]]
    started = replace(given, starts=torch.tensor([1]).int())
    assert mqa_logits(started, 2).tolist() == [[-float("inf"), 2.0]]


@pytest.mark.parametrize("spoil", ["score", "untouched", "bits"])
def test_the_check_finds_what_it_is_for(spoil: str) -> None:
    calls = []

    def wrong(given: MqaOperands, logits: torch.Tensor) -> None:
        calls.append(1)
        run_reference(given, logits)
        if spoil == "score":
            logits[-1, 3] *= 1.1
        if spoil == "untouched":
            logits[0, -1] = 0
        if spoil == "bits" and len(calls) == 2:
            logits[2, 2] += 1e-5

    with pytest.raises(AssertionError):
        assert_logits(make_ragged(5, 70, 64, CPU, 4), 70, wrong)


def test_operands_no_kernel_takes_are_refused() -> None:
    given = make_ragged(4, 64, 64, CPU, 5)
    paged, _ = make_paged(LENGTHS, 1, 64, 64, CPU, 5)
    wrong = [
        (replace(given, weights=given.weights.double()), 64, "weights is"),
        (replace(given, ends=given.ends.long()), 64, "ends is"),
        (replace(given, starts=given.ends[:2]), 64, "starts is"),
        (
            replace(given, queries=torch.zeros(4, 5, 128).to(torch.float8_e4m3fn), weights=torch.zeros(4, 5)),
            64,
            "5 h",
        ),
        (given, 65, "65 columns of 64"),
        (replace(paged, keys=replace(paged.keys, table=None)), 64, "no table"),
        (replace(given, keys=replace(given.keys, scales=given.keys.scales[:, ::2])), 64, "scales is"),
        (replace(given, keys=replace(given.keys, table=torch.zeros(3, 1).int())), 64, "tokens of 3 sequences"),
    ]
    for operands, columns, reason in wrong:
        with pytest.raises(KernelError, match=reason):
            mqa_logits(operands, columns)


def test_plans_share_keys_among_many_tokens_and_take_turns_for_few() -> None:
    assert plan_of(make_ragged(5, 64, 64, CPU, 6)) == MANY
    assert plan_of(make_paged(LENGTHS, 1, 64, 64, CPU, 6)[0]) == FEW
    assert plan_of(make_paged(LENGTHS, 2, 64, 61, CPU, 6)[0]) == replace(FEW, tokens=2, page=61, joined=False)
    assert plan_of(make_paged(LENGTHS, 3, 32, 64, CPU, 6)[0]) == replace(FEW, heads=32, tokens=4)
    for heads, tokens in ((16, 9), (32, 5), (64, 3)):
        plan = plan_of(make_ragged(tokens, 64, heads, CPU, 6))
        assert not plan.split and scoring_bytes(plan) <= 232_448 - 1024 and plan.query_box <= 256


@pytest.mark.parametrize(
    "plan",
    [
        MANY,
        replace(MANY, heads=32, tokens=8, page=576),
        replace(MANY, heads=16, tokens=8, page=1),
        replace(FEW, tokens=2),
        replace(FEW, heads=32, tokens=4, page=61, joined=False),
    ],
)
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_without_spills(plan: Plan) -> None:
    cubin, report = compile_for(plan)
    assert cubin
    assert "0 bytes spill stores" in report
