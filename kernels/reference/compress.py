"""Compressor pooling in torch: each window this batch completes becomes one entry in its block."""

from __future__ import annotations

import torch

from kernels.operands import CompressorSpec, Pages, Ragged, Ring, RopeTable
from kernels.reference.norm import rotate, unit_rms
from kernels.reference.storage import history, store_entry, store_mixed, store_rows


def compress(
    projected: torch.Tensor, spec: CompressorSpec, ragged: Ragged, ring: Ring, pages: Pages, rope: RopeTable
) -> None:
    """Pool the windows in `ragged.windows[rate]` into `pages`, then keep the newest [content | gate] rows in `ring`.

    Entry w = rope(norm(sum_j softmax_j(gate_j + bias_j) * content_j), position w * rate), softmax per channel over the
    window's rows; with overlap also over the rows of the window before it, which give their first part.
    """
    rows = projected[:, spec.column : spec.column + spec.row_width]
    done = ragged.windows[spec.rate]
    for s, w in zip(done.sequence.tolist(), done.window.tolist(), strict=True):
        content, gate = _window(rows, s, w, spec, ragged, ring)
        entry = unit_rms((gate.softmax(0) * content).sum(0), spec.norm_eps) * spec.norm
        at = w * spec.rate
        entry = rotate(entry, rope.cos[at], rope.sin[at])
        if spec.mixing is None or pages.scales is None:
            store_entry(s, ragged, pages, w, entry)
        else:
            store_mixed(s, ragged, pages, w, entry, spec.mixing)
    store_rows(projected, spec.column, ragged, ring)


def _window(
    rows: torch.Tensor, s: int, w: int, spec: CompressorSpec, ragged: Ragged, ring: Ring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Content and biased gate, [rows pooled, width] each."""
    d, own = spec.width, range(w * spec.rate, (w + 1) * spec.rate)
    content, gate = history(rows, s, ragged, ring, own).chunk(2, 1)
    gate = gate + spec.bias
    if not spec.overlap:
        return content, gate
    content, gate = content[:, d:], gate[:, d:]
    if w > 0:
        before = range((w - 1) * spec.rate, w * spec.rate)
        old_content, old_gate = history(rows, s, ragged, ring, before).chunk(2, 1)
        content = torch.cat([old_content[:, :d], content])
        gate = torch.cat([(old_gate + spec.bias)[:, :d], gate])
    return content, gate
