"""The Hopper kernel of sparse prefill against float64: hostile operands, head counts, repeats, batches and graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.cuda.sparse_prefill import sparse_prefill as launch
from kernels.reference.sparse_prefill import WIDTHS
from kernels.testing.attention import assert_captures
from kernels.testing.sparse_prefill import Case, assert_case, make_case

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")]


def run_kernel(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = case.outputs()
    launch(case.query, case.named, case.sink, case.scale, output, lse)
    return output, lse


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel_equals_float64_on_a_gpu(width: int, hostile: bool) -> None:
    for queries, heads, listed in ((1, 64, 64), (5, 16, 200), (7, 70, 65), (40, 128, 640), (321, 64, 1)):
        sink = heads > 16
        assert_case(make_case(queries, heads, width, listed, 2_000, torch.device("cuda"), 1, hostile, sink), run_kernel)


def test_kernel_has_the_same_bits_alone_in_a_batch_and_from_a_graph() -> None:
    case = make_case(40, 64, 576, 640, 4_000, torch.device("cuda"), 5, hostile=True)
    output, lse = run_kernel(case)
    for row in (1, 17, 39):
        one = slice(row, row + 1)
        named = replace(case.named, indices=case.named.indices[one], lengths=case.named.lengths[one])
        assert torch.equal(run_kernel(Case(case.query[one], named, case.sink, case.scale))[0][0], output[row])
    assert_captures(partial(launch, case.query, case.named, case.sink, case.scale), (output, lse))
