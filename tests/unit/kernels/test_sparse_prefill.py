"""Sparse prefill over bf16 latents: its float64 definition, and the Hopper kernel as far as CPUs go."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from kernels.cuda.driver import has_nvrtc
from kernels.cuda.sparse_prefill import compile_for
from kernels.errors import KernelError
from kernels.reference.sparse_prefill import WIDTHS, check_operands, sparse_prefill
from kernels.testing.attention import SPOILS, assert_finds
from kernels.testing.sparse_prefill import Case, assert_case, make_case

CPU = torch.device("cpu")


def small(width: int = 576, hostile: bool = False, sink: bool = True) -> Case:
    return make_case(5, 3, width, 9, 40, CPU, seed=3, hostile=hostile, sink=sink)


def run_reference(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = sparse_prefill(case.query, case.named, case.sink, case.scale)
    return output.to(torch.bfloat16), lse.float()


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_reference_is_softmax_over_what_is_named(width: int, sink: bool) -> None:
    case = small(width, sink=sink)
    found, lse = sparse_prefill(case.query, case.named, case.sink, case.scale)
    for query in range(5):
        keys = [case.named.keys[slot].double() for slot in case.named.indices[query].tolist()]
        for head in range(3):
            scores = [float(case.query[query, head].double() @ key) * case.scale for key in keys]
            total = sum(math.exp(score) for score in scores)
            assert lse[query, head].item() == pytest.approx(math.log(total))
            total += math.exp(float(case.sink[head])) if case.sink is not None else 0
            expected = sum(math.exp(score) / total * key[:512] for score, key in zip(scores, keys, strict=True))
            torch.testing.assert_close(found[query, head], expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_latents_that_nobody_names_are_never_read(width: int) -> None:
    assert assert_case(small(width, hostile=True), run_reference) < 6e-3  # they read as NaN and as infinity


def test_a_query_that_names_nothing_has_output_0_and_lse_infinity() -> None:
    output, lse = run_reference(small(hostile=True))
    for query in (0, 2):  # of length 0, and of indices that are all -1
        assert not output[query].any()
        assert bool((lse[query] == torch.inf).all())


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_check_finds_what_it_is_for(spoil: str) -> None:
    assert_finds(small(hostile=True), run_reference, assert_case, spoil, empty=0)


def test_operands_no_kernel_takes_are_refused() -> None:
    case = small()
    output, lse = case.outputs()
    named, query, sink = case.named, case.query, case.sink
    wrong = [
        ((query[..., :500], named, sink, output, lse), "500 channels"),
        ((query.float(), named, sink, output, lse), "query is"),
        ((query, named, sink, output[..., :511], lse), "output is"),
        ((query, named, torch.zeros(2), output, lse), "sink is"),
        ((query, replace(named, indices=named.indices.long()), sink, output, lse), "indices is"),
        ((query, replace(named, lengths=torch.zeros(3, dtype=torch.int32)), sink, output, lse), "lengths is"),
        ((query, replace(named, keys=named.keys[:, :512]), sink, output, lse), "keys are"),
        ((query, replace(named, keys=torch.zeros(9, 577).bfloat16()[:, :576]), sink, output, lse), "strides"),
    ]
    check_operands(query, named, sink, output, lse)
    for operands, reason in wrong:
        with pytest.raises(KernelError, match=reason):
            check_operands(*operands)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC comes with the extras 'dev' and 'gpu'")
def test_kernel_compiles_ahead_for_hopper_without_spills(width: int) -> None:
    cubin, report = compile_for(width)
    assert cubin
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", report)]
    assert max(spilled) == 0
    assert "serialized" not in report  # products would wait for each other
