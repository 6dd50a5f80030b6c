"""The kernel of index scores on a GPU against float64: ragged and paged, hostile operands, repeats and graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cuda.mqa_logits import mqa_logits
from kernels.testing.mqa_logits import assert_logits, make_hostile, make_paged, make_ragged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LENGTHS = torch.tensor([130, 0, 1, 64, 65, 5000, 63, 577])


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 1000), (5, 63), (200, 300), (77, 5003)])
def test_kernel_equals_float64_on_one_sequence(tokens: int, keys: int, heads: int) -> None:
    given = make_ragged(tokens, keys, heads, torch.device("cuda"), tokens)
    assert_logits(given, keys, mqa_logits, 1000)
    assert_logits(replace(make_hostile(given), starts=(given.ends * 0.3).int()), keys, mqa_logits, 1000)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("page_tokens", [1, 16, 61, 64, 576])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_kernel_equals_float64_on_pages(tokens: int, page_tokens: int, heads: int) -> None:
    given, columns = make_paged(LENGTHS, tokens, heads, page_tokens, torch.device("cuda"), tokens)
    assert_logits(make_hostile(given), columns, mqa_logits, 1000)


def test_scores_of_a_token_have_the_same_bits_in_any_batch() -> None:
    given, columns = make_paged(LENGTHS, 1, 64, 64, torch.device("cuda"), 3)
    together = torch.zeros(len(LENGTHS), columns, device="cuda")
    mqa_logits(given, together)
    table = given.keys.table
    assert table is not None
    for s in range(len(LENGTHS)):
        of = slice(s, s + 1)
        keys = replace(given.keys, table=table[of])
        one = replace(given, queries=given.queries[of], weights=given.weights[of], ends=given.ends[of], keys=keys)
        alone = torch.zeros(1, columns, device="cuda")
        mqa_logits(one, alone)
        assert torch.equal(alone[0], together[s])


def test_kernel_has_the_same_bits_from_a_graph_and_allocates_nothing() -> None:
    given = make_ragged(50, 3000, 64, torch.device("cuda"), 4)
    found, replayed = (torch.zeros(50, 3000, device="cuda") for _ in range(2))
    mqa_logits(given, found)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    mqa_logits(given, replayed)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mqa_logits(given, replayed)
    replayed.fill_(0)
    graph.replay()
    assert torch.equal(replayed, found)
