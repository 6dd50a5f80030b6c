"""The Hopper kernel of dense decode against float64: hostile operands, page sizes, splits, repeats, batches, graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.cuda.dense_decode import dense_decode
from kernels.cuda.dense_decode_fp8 import dense_decode_fp8
from kernels.cuda.spans import Split, Workspace, workspace_for
from kernels.reference.dense_decode import PagedRecords
from kernels.testing.attention import assert_captures
from kernels.testing.dense_decode import FP8, Case, assert_case, make_case, make_record_case

PAGES = (1, 2, 61, 64, 576)
LENGTHS = (0, 1, 63, 64, 65, 700, 3_000, 2)
_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")]


def launch(case: Case, split: Split, workspace: Workspace, output: torch.Tensor, lse: torch.Tensor) -> None:
    if isinstance(case.cache, PagedRecords):
        dense_decode_fp8(case.query, case.cache, case.scale, split, workspace, output, lse)
    else:
        dense_decode(case.query, case.cache, case.scale, split, workspace, output, lse)


def run_kernel(case: Case, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = case.outputs()
    batch, tokens, heads, _ = case.query.shape
    workspace = workspace_for(split, batch, tokens * heads, case.query.device)
    workspace.partial.fill_(torch.nan)
    launch(case, split, workspace, output, lse)
    return output, lse


@pytest.mark.parametrize("split", [Split(4_096, 1), Split(64, 64), Split(1_024, 3)])
@pytest.mark.parametrize("page", PAGES)
def test_kernel_equals_float64_on_a_gpu(page: int, split: Split) -> None:
    for tokens, heads in ((1, 16), (4, 16), (1, 64), (3, 70), (2, 128)):
        for hostile in (False, True):
            case = make_case(LENGTHS, tokens, heads, page, torch.device("cuda"), tokens + page, hostile)
            assert_case(case, partial(run_kernel, split=split))
            case = make_record_case(LENGTHS, tokens, heads, page, torch.device("cuda"), tokens + page, hostile)
            assert_case(case, partial(run_kernel, split=split), FP8)


@pytest.mark.parametrize("split", [Split(64, 2), Split(64, 7)])
def test_sequences_too_long_for_a_splits_spans_are_cut_into_longer_ones(split: Split) -> None:
    for page, heads in ((64, 16), (61, 128)):
        case = make_case(LENGTHS, 2, heads, page, torch.device("cuda"), heads, hostile=True)
        assert_case(case, partial(run_kernel, split=split))


@pytest.mark.parametrize("split", [Split(1_024, 3), Split(4_096, 1)])
@pytest.mark.parametrize("make", [make_case, make_record_case])
def test_kernel_has_the_same_bits_alone_in_a_batch_and_from_a_graph(make: Callable[..., Case], split: Split) -> None:
    case = make(LENGTHS, 2, 64, 64, torch.device("cuda"), 5, hostile=True)
    output, lse = run_kernel(case, split)
    for row in (1, 5, 6):
        one = slice(row, row + 1)
        cache = replace(case.cache, tables=case.cache.tables[one], lengths=case.cache.lengths[one])
        assert torch.equal(run_kernel(Case(case.query[one], cache, case.scale), split)[0][0], output[row])
    workspace = workspace_for(split, len(LENGTHS), 128, case.query.device)
    assert_captures(partial(launch, case, split, workspace), (output, lse))


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("code", [0x3A, 0x03])  # 1.25, and a subnormal E4M3
def test_equal_values_of_records_come_back_whatever_their_weights(heads: int, code: int) -> None:
    case = make_record_case((8_192, 100), 1, heads, 64, torch.device("cuda"), code)
    assert isinstance(case.cache, PagedRecords)
    records = case.cache.pages[:, : 64 * 656].view(-1, 64, 656)
    records[:, :, :512] = code
    records[:, :, 512:528] = torch.full((4,), 0.7, device="cuda").view(torch.uint8)
    value = torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).float().item() * 0.7
    output = run_kernel(case, Split(8_192, 1))[0].float()
    torch.testing.assert_close(output, torch.full_like(output, value), rtol=2**-7, atol=0)
