"""The kernel that scores and chooses on a GPU, against the best of the scores that the other kernel writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.cuda.indexer_top_k import indexer_top_k, workspace_of
from kernels.cuda.mqa_logits import mqa_logits
from kernels.reference.mqa_logits import MqaOperands
from kernels.testing.indexer_top_k import assert_best, make_rising
from kernels.testing.mqa_logits import make_hostile, make_paged, make_ragged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = torch.tensor([130, 0, 1, 64, 65, 5000, 63, 20_577])


def check(given: MqaOperands, columns: int) -> None:
    scores = torch.zeros(len(given.ends), columns, device="cuda")
    mqa_logits(given, scores)
    workspace = workspace_of(torch.device("cuda"))
    for count in (1, 100, 2048):
        assert_best(given, count, scores, lambda now, to: indexer_top_k(now, columns, workspace, to), 1000)


def unchanged(given: MqaOperands) -> MqaOperands:
    return given


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("change", [unchanged, make_hostile, make_rising])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 30_000), (5, 63), (300, 9000)])
def test_kernel_chooses_the_best_keys_of_one_sequence(
    tokens: int, keys: int, change: Callable[[MqaOperands], MqaOperands], heads: int
) -> None:
    check(change(make_ragged(tokens, keys, heads, torch.device("cuda"), tokens)), keys)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("page_tokens", [1, 61, 64, 576])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_kernel_chooses_the_best_keys_of_pages(tokens: int, page_tokens: int, heads: int) -> None:
    given, columns = make_paged(LENGTHS, tokens, heads, page_tokens, torch.device("cuda"), tokens)
    check(make_hostile(given), columns)
