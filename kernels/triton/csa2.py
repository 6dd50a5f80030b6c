"""V4.1's own operators of the triton backend: pooled latents, entry choice within candidates, single-pass mixing, the
n-gram memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.csa2 import ChoiceSpec, EngramSpec
from kernels.operands import Pages, Ragged, RopeTable, Selection
from kernels.reference import csa2 as definition
from kernels.reference.top_k import top_k
from kernels.staging import on_device
from kernels.triton import engram as tile
from kernels.triton.engine.compress import pool, store_entries
from kernels.triton.engine.index import TopK, score_entries, turn_heads
from kernels.triton.engine.rows import norm
from kernels.triton.engine.streams import hyper_collapse, hyper_mix


def rotate_heads(x: Tensor, width: int, positions: np.ndarray | Tensor, rope: RopeTable) -> Tensor:
    """As reference.csa2.rotate_heads."""
    at = positions
    if not isinstance(at, Tensor):
        at = on_device(np.ascontiguousarray(at, np.int32), x.device)
    return turn_heads(x, 0, x.shape[1] // width, width, at, rope)


def choose(
    queries: Tensor, weights: Tensor, spec: ChoiceSpec, ragged: Ragged, pages: Pages, candidates: Selection | None,
    top_k: TopK = top_k,
) -> tuple[Selection, Selection | None]:  # fmt: skip
    """As reference.csa2.choose."""
    scores, visible = score_entries(queries, weights, spec.heads, spec.width, ragged, pages)
    proposed = _propose(scores, visible, spec, top_k) if spec.blocks else None
    if candidates is None:
        return Selection(top_k(scores, spec.topk, visible).clamp_min(0), visible.clamp_max(spec.topk)), proposed
    allowed = _allowed(scores, candidates, spec)
    chosen = top_k(scores.masked_fill(~allowed, -torch.inf), spec.topk, visible)
    # Where fewer are allowed than may be chosen, others were chosen as well: they go, and the rest moves together.
    keep = (chosen >= 0) & allowed.gather(1, chosen.clamp_min(0).long())
    sorted_ = torch.where(keep, chosen, scores.shape[1]).sort(1).values
    counts = keep.sum(1).to(torch.int32)
    return Selection(sorted_.clamp_max(scores.shape[1] - 1).to(torch.int32), counts), proposed


def _propose(scores: Tensor, visible: Tensor, spec: ChoiceSpec, top_k: TopK) -> Selection:
    """The best blocks of each row, the newest among them."""
    place = torch.arange(scores.shape[1], device=scores.device)
    seen = scores.masked_fill(place >= visible[:, None], -torch.inf)
    padded = torch.nn.functional.pad(seen, (0, -scores.shape[1] % (4 * spec.block_entries)), value=-torch.inf)
    blocks = padded.unflatten(1, (-1, spec.block_entries)).amax(2)
    count = (visible + spec.block_entries - 1) // spec.block_entries
    newest = torch.arange(blocks.shape[1], device=scores.device) == count[:, None] - 1
    best = top_k(blocks.masked_fill(newest, torch.inf), spec.blocks, count)
    return Selection(best.clamp_min(0), count.clamp_max(spec.blocks))


def _allowed(scores: Tensor, candidates: Selection, spec: ChoiceSpec) -> Tensor:
    """bool [rows, entries]: the entry lies in a candidate block."""
    blocks = -(-scores.shape[1] // spec.block_entries)
    lane = torch.arange(candidates.entries.shape[1], device=scores.device)
    named = torch.where(lane < candidates.counts[:, None], candidates.entries, blocks).long()
    inside = torch.zeros(len(scores), blocks + 1, dtype=torch.bool, device=scores.device).scatter_(1, named, True)
    return inside[:, :blocks].repeat_interleave(spec.block_entries, 1)[:, : scores.shape[1]]


def engram(x: Tensor, projected: Tensor, alive: Tensor, spec: EngramSpec) -> Tensor:
    """As reference.csa2.engram."""
    out = torch.empty_like(x)
    tile.launch_gate(x, projected, alive, spec.query_norm, spec.key_norm, spec.norm_eps, out)
    return out


def hash_rows(recent: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """As reference.engram.hash_rows."""
    rows = torch.empty(len(recent), *primes.shape, dtype=torch.int64, device=recent.device)
    tile.hash_rows(recent, multipliers, primes, offsets, pad, rows)
    return rows


def gather(rows: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """As reference.engram.gather, in fp32."""
    out = torch.empty(len(rows), rows.shape[1] * codes.shape[1], dtype=torch.float32, device=rows.device)
    tile.launch_gather(rows, codes, scales, out)
    return out


OPS = replace(
    definition.OPS,
    norm=norm,
    engram=engram,
    hash_rows=hash_rows,
    gather=gather,
    hyper_mix=hyper_mix,
    hyper_collapse=hyper_collapse,
    pool=pool,
    rotate_heads=rotate_heads,
    store_entries=store_entries,
    choose=choose,
)
