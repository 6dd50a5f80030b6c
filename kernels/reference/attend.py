"""Attention in torch: one shared key per position for all heads, over a window, compressed entries and a sink."""

from __future__ import annotations

import torch

from kernels.operands import AttentionSpec, Pages, Ragged, Ring, RopeTable, Selection
from kernels.reference.norm import rotate, unit_rms
from kernels.reference.storage import entries, history, in_records


def attend(
    queries: torch.Tensor, fresh: torch.Tensor, spec: AttentionSpec, ragged: Ragged, ring: Ring,
    pages: Pages | None, selection: Selection | None, rope: RopeTable,
) -> torch.Tensor:  # fmt: skip
    """queries [rows, >= heads * width] (raw), fresh keys [rows, width] -> fp32 [rows, heads * width].

    A row sees the last `window` positions (itself included, none below its sequence's floor) and, of the
    (position + 1) // rate finished entries, all or those selected. The sink adds exp(sink) to the denominator only. The
    output's rotary part is turned back by the query's own angle, because keys serve as values. Where the ring holds
    records, fresh keys count as they will be held.
    """
    fresh = in_records(fresh, ring)
    out = queries.new_empty(queries.shape[0], spec.heads * spec.width)
    for row in range(queries.shape[0]):
        at, s = int(ragged.positions[row]), int(ragged.sequences[row])
        cosine, sine = rope.cos[at], rope.sin[at]
        heads = queries[row, : spec.heads * spec.width].view(spec.heads, spec.width)
        query = rotate(heads if spec.norm_eps is None else unit_rms(heads, spec.norm_eps), cosine, sine)
        keys = history(fresh, s, ragged, ring, range(max(int(ragged.window_floors[s]), at - spec.window + 1), at + 1))
        if pages is not None:
            seen = entries(s, ragged, pages, (at + 1) // pages.rate)
            if selection is not None:
                seen = seen[selection.entries[row, : int(selection.counts[row])].long()]
            keys = torch.cat([keys, seen])
        keys = keys.to(torch.float32)
        scores = torch.cat([query @ keys.T * spec.width**-0.5, spec.sink[:, None]], 1)
        mixed = scores.softmax(-1)[:, :-1] @ keys
        out[row] = rotate(mixed, cosine, -sine).flatten()
    return out
