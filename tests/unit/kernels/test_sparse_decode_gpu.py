"""The Hopper kernel of sparse decode against float64: hostile operands, page sizes, repeats, batches and graphs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.cuda.spans import Split, workspace_for
from kernels.cuda.sparse_decode import PAIRS, WHOLE, padded_keys
from kernels.cuda.sparse_decode import sparse_decode as launch
from kernels.reference.sparse_decode import RecordKind, SparseCache
from kernels.testing.attention import assert_captures
from kernels.testing.sparse_decode import Case, assert_case, make_case

PAGES = (1, 2, 61, 64, 576)
_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")]


def run_kernel(case: Case, split: Split = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = case.outputs()
    room = workspace_for(split, *case.query.shape[:2], case.query.device)
    room.partial.fill_(torch.nan)
    launch(case.query, case.main, case.extra, case.sink, case.scale, output, lse, split, room)
    return output, lse


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kinds", PAIRS)
def test_kernel_equals_float64_on_a_gpu(kinds: tuple[RecordKind, RecordKind | None], page: int) -> None:
    shapes = [(1, 64, (64, 64)), (5, 16, (200, 130)), (7, 128, (129, 640)), (4, 70, (1, 65)), (321, 64, (63, 1))]
    for queries, heads, counts in shapes:
        for hostile in (False, True):
            seed = queries + page
            case = make_case(
                kinds, queries, heads, counts, 2_000, page, torch.device("cuda"), seed, hostile, heads > 16
            )
            assert_case(case, run_kernel)
            keys = padded_keys(case.main, case.extra)
            for span in (64, 192):
                assert_case(case, partial(run_kernel, split=Split(span, max(2, -(-keys // span)))))


def test_kernel_has_the_same_bits_alone_in_a_batch_and_from_a_graph() -> None:
    case = make_case(PAIRS[4], 40, 64, (128, 512), 4_000, 64, torch.device("cuda"), 5, hostile=True)
    output, lse = run_kernel(case)

    def only(cache: SparseCache, row: int) -> SparseCache:
        return replace(cache, indices=cache.indices[row : row + 1], lengths=cache.lengths[row : row + 1])

    for row in (0, 17, 39):
        extra = only(case.extra, row) if case.extra else None
        alone = Case(case.query[row : row + 1], only(case.main, row), extra, case.sink, case.scale)
        assert torch.equal(run_kernel(alone)[0][0], output[row])
    assert_captures(partial(launch, case.query, case.main, case.extra, case.sink, case.scale), (output, lse))
