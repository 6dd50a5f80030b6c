"""Multi-head latent attention in torch: its cached rows, and both ways to attend over them. Knows pages, not layers."""

from __future__ import annotations

import torch

from kernels.operands import IndexKeySpec, MlaSpec, Pages, Ragged, RopeTable, Selection
from kernels.reference.norm import norm, rotate
from kernels.reference.storage import entries, store_entry, store_mixed

_SCORE_ROWS = 128  # query rows whose scores are held at once


def store_latent(projected: torch.Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages, rope: RopeTable) -> None:
    """Write each token's row: columns `column .. + rank` normed, the next `rope` rotated, in the pages' own type."""
    key = spec.column + spec.rank
    latent = norm(projected[:, spec.column : key], spec.norm, spec.norm_eps)
    at = torch.from_numpy(ragged.positions).long()
    turned = rotate(projected[:, key : key + spec.rope], rope.cos[at], rope.sin[at])
    _store(torch.cat([latent, turned], 1), ragged, pages)


def store_index_key(projected: torch.Tensor, spec: IndexKeySpec, ragged: Ragged, pages: Pages, rope: RopeTable) -> None:
    """Write each token's indexer key: layer norm, then the trailing channels rotated; mixed and cast where asked."""
    width = spec.norm.shape[0]
    raw = projected[:, spec.column : spec.column + width]
    key = torch.nn.functional.layer_norm(raw, (width,), spec.norm, spec.bias, spec.norm_eps)
    at = torch.from_numpy(ragged.positions).long()
    key = rotate(key, rope.cos[at], rope.sin[at])
    if spec.mixing is None or pages.scales is None:
        _store(key, ragged, pages)
        return
    for row, (s, place) in enumerate(zip(ragged.sequences, ragged.positions, strict=True)):
        store_mixed(int(s), ragged, pages, int(place), key[row], spec.mixing)


def attend_latent(
    absorbed: torch.Tensor, turning: torch.Tensor, spec: MlaSpec, ragged: Ragged, pages: Pages,
    selection: Selection | None, rope: RopeTable,
) -> torch.Tensor:  # fmt: skip
    """The absorbed form: absorbed [rows, heads * rank], turning [rows, heads * rope] (not yet rotated), over the rows
    of every position up to a token's own, or of those selected -> mixed latents fp32 [rows, heads * rank].
    """
    out = absorbed.new_empty(absorbed.shape[0], spec.heads * spec.rank)
    for row in range(absorbed.shape[0]):
        at = int(ragged.positions[row])
        turned = rotate(turning[row].view(spec.heads, spec.rope), rope.cos[at], rope.sin[at])
        query = torch.cat([absorbed[row].view(spec.heads, spec.rank), turned], 1)
        keys = read_rows(int(ragged.sequences[row]), ragged, pages, at + 1)
        if selection is not None:
            keys = keys[selection.entries[row, : int(selection.counts[row])].long()]
        out[row] = ((query @ keys.T * spec.scale).softmax(-1) @ keys[:, : spec.rank]).flatten()
    return out


def read_rows(s: int, ragged: Ragged, pages: Pages, count: int) -> torch.Tensor:
    """The first `count` rows of sequence s as fp32 [count, width]."""
    return entries(s, ragged, pages, count).to(torch.float32)


def attend_expanded(
    queries: torch.Tensor, expanded: torch.Tensor, turned: torch.Tensor, spec: MlaSpec, positions: range,
    chosen: torch.Tensor | None, rope: RopeTable,
) -> torch.Tensor:  # fmt: skip
    """The un-absorbed form, for one sequence's rows at `positions`.

    queries [rows, heads * (nope + rope)] (not yet rotated), expanded [keys, heads * (nope + value)] and the rotated
    keys [keys, rope] of positions 0 .. keys; chosen: bool [rows, keys] or None for all -> fp32 [rows, heads * value].
    """
    heads, at = spec.heads, torch.arange(positions.start, positions.stop, device=queries.device)
    split = queries.split([heads * spec.nope, heads * spec.rope], 1)
    still = split[0].unflatten(1, (heads, spec.nope)).transpose(0, 1)
    turning = rotate(split[1].unflatten(1, (heads, spec.rope)), rope.cos[at, None], rope.sin[at, None]).transpose(0, 1)
    keys, values = expanded.unflatten(1, (heads, -1)).transpose(0, 1).split([spec.nope, spec.value], 2)
    seen = torch.arange(expanded.shape[0], device=queries.device) <= at[:, None]
    if chosen is not None:
        seen &= chosen
    out = queries.new_empty(len(at), heads * spec.value)
    for first in range(0, len(at), _SCORE_ROWS):
        rows = slice(first, first + _SCORE_ROWS)
        scores = (still[:, rows] @ keys.transpose(1, 2) + turning[:, rows] @ turned.T) * spec.scale
        weights = scores.masked_fill_(~seen[rows], -torch.inf).softmax(-1)
        out[rows] = (weights @ values).transpose(0, 1).flatten(1)
    return out


def _store(rows: torch.Tensor, ragged: Ragged, pages: Pages) -> None:
    for row, (s, at) in enumerate(zip(ragged.sequences, ragged.positions, strict=True)):
        store_entry(int(s), ragged, pages, int(at), rows[row])
