"""Lightning indexer in torch: scores every visible index key and keeps the best, the lower index where scores tie."""

from __future__ import annotations

import torch

from kernels.operands import IndexerSpec, Pages, Ragged, RopeTable, Selection
from kernels.reference.norm import rotate
from kernels.reference.records import index_codes, index_values
from kernels.reference.storage import entries


def index_topk(
    queries: torch.Tensor, projected: torch.Tensor, spec: IndexerSpec, ragged: Ragged, pages: Pages, rope: RopeTable
) -> Selection:
    """Choose up to topk entries for each row.

    score[e] = sum_h weight[h] * heads**-0.5 * relu(q_h . k_e * width**-0.5) over the (position + 1) // rate visible
    entries; queries [rows, ...] hold the heads at `query_column`, projected [rows, ...] the weights at `weight_column`.
    Where keys are records, heads are mixed and cast as they were.
    """
    rows = queries.shape[0]
    chosen = queries.new_zeros(rows, spec.topk, dtype=torch.int32)
    counts = queries.new_zeros(rows, dtype=torch.int32)
    for row in range(rows):
        at = int(ragged.positions[row])
        visible = (at + 1) // pages.rate
        best = torch.arange(visible)
        if visible > spec.topk:
            heads = queries[row, spec.query_column :][: spec.heads * spec.width].view(spec.heads, spec.width)
            weights = projected[row, spec.weight_column :][: spec.heads] * spec.heads**-0.5
            keys = entries(int(ragged.sequences[row]), ragged, pages, visible).to(torch.float32)
            heads = rotate(heads, rope.cos[at], rope.sin[at])
            if spec.mixing is not None:
                heads = index_values(*index_codes(heads, spec.mixing))
            scores = (heads @ keys.T * spec.width**-0.5).relu()
            best = torch.sort(weights @ scores, descending=True, stable=True).indices[: spec.topk].sort().values
        counts[row] = len(best)
        chosen[row, : len(best)] = best.to(torch.int32)
    return Selection(chosen, counts)
