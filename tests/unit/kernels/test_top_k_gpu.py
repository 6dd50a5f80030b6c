"""The kernel of exact top-k on a GPU against its definition: hostile scores, short rows, repeats and graphs."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.top_k import top_k
from kernels.testing.top_k import HOSTILE, assert_top_k, make_lengths, make_scores

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("columns", [3, 8192, 8193, 32_768, 65_536, 65_540, 1 << 20])
@pytest.mark.parametrize("kind", HOSTILE)
def test_kernel_equals_the_definition_on_a_gpu(kind: str, columns: int) -> None:
    cuda = torch.device("cuda")
    for count in (1, 512, 2048):
        scores = make_scores(kind, 14, columns, cuda, columns)
        assert_top_k(scores, count, None, top_k)
        assert_top_k(scores, count, make_lengths(14, columns, cuda), top_k)


def test_kernel_has_the_same_bits_from_a_graph_and_allocates_nothing() -> None:
    scores = make_scores("few", 9, 30_000, torch.device("cuda"), 4)
    found, replayed = (torch.full((9, 512), -7, dtype=torch.int32, device="cuda") for _ in range(2))
    top_k(scores, None, found)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    top_k(scores, None, replayed)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top_k(scores, None, replayed)
    replayed.fill_(-7)
    graph.replay()
    assert torch.equal(replayed, found)
