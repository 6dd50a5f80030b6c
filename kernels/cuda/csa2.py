"""V4.1's own operators of the CUDA backend: Triton's, with the best entries and blocks from the top-k kernel."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kernels.csa2 import ChoiceSpec
from kernels.cuda.engine.choice import top_k
from kernels.cuda.engine.records import store_entries
from kernels.operands import Pages, Ragged, Selection
from kernels.triton import csa2 as by_triton


def choose(
    queries: Tensor, weights: Tensor, spec: ChoiceSpec, ragged: Ragged, pages: Pages, candidates: Selection | None
) -> tuple[Selection, Selection | None]:
    """As reference.csa2.choose."""
    return by_triton.choose(queries, weights, spec, ragged, pages, candidates, top_k)


OPS = replace(by_triton.OPS, store_entries=store_entries, choose=choose)
