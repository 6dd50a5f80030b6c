"""V4.1's own operators in torch: single-pass mixing, pooled latents, entry choice within candidates, Engram's gate."""

from __future__ import annotations

import numpy as np
import torch

from kernels.csa2 import ChoiceSpec, Csa2Ops, EngramSpec, PoolSpec
from kernels.operands import HyperSite, Pages, Ragged, Ring, RopeTable, Selection
from kernels.reference.hyper import collapse, sinkhorn
from kernels.reference.linear import linear
from kernels.reference.norm import rotate, unit_rms
from kernels.reference.records import packed, values_of
from kernels.reference.storage import entries, history, store_entry, store_rows


def hyper_mix(x: torch.Tensor, site: HyperSite) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Streams x [rows, m, hidden] -> pre [rows, m], for the site after this one, post [rows, m], comb [rows, m, m]."""
    m = site.streams
    z = linear(unit_rms(x.flatten(1), site.norm_eps), site.mix)
    scale, base = site.scale, site.base
    pre = torch.sigmoid(z[:, :m] * scale[0] + base[:m]) + site.hyper_eps
    post = 2 * torch.sigmoid(z[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (z[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m).softmax(-1) + site.hyper_eps
    return pre, post, sinkhorn(comb, site.iterations, site.hyper_eps)


def hyper_collapse(x: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normed weighted sum of the streams: x [rows, m, hidden], pre [rows, m] -> [rows, hidden]."""
    return collapse(x, pre, weight, eps)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, width] over its root mean square, times weight [width]."""
    return unit_rms(x, eps) * weight


def rotate_heads(x: torch.Tensor, width: int, positions: np.ndarray | torch.Tensor, rope: RopeTable) -> torch.Tensor:
    """Every head of x [rows, heads * width] turned to its row's position: int32 [rows], on x's device if a tensor."""
    at = torch.as_tensor(positions).long()
    return rotate(x.view(len(x), -1, width), rope.cos[at][:, None], rope.sin[at][:, None]).flatten(1)


def pool(projected: torch.Tensor, spec: PoolSpec, ragged: Ragged, ring: Ring | None) -> torch.Tensor:
    """Latents [windows, width] of `ragged.windows[rate]`, before rotation; the newest rows stay in `ring`.

    Latent w = norm(sum_j softmax_j(gate_j) * content_j) per channel; at rate 1, which keeps no ring, norm(content).
    """
    done, width = ragged.windows[spec.rate], spec.width
    if ring is None:
        first = ragged.starts[done.sequence] - ragged.context[done.sequence]
        return norm(projected[first + done.window, spec.column : spec.column + width], spec.norm, spec.norm_eps)
    rows = projected[:, spec.column : spec.column + 2 * width]
    pooled = projected.new_empty(len(done.window), width)
    for i, (s, w) in enumerate(zip(done.sequence.tolist(), done.window.tolist(), strict=True)):
        content, gate = history(rows, s, ragged, ring, range(w * spec.rate, (w + 1) * spec.rate)).chunk(2, 1)
        pooled[i] = (gate.softmax(0) * content).sum(0)
    store_rows(projected, spec.column, ragged, ring)
    return norm(pooled, spec.norm, spec.norm_eps)


def store_entries(values: torch.Tensor, ragged: Ragged, pages: Pages) -> None:
    """Write values [windows, width] as the entries of `ragged.windows[pages.rate]`."""
    done = ragged.windows[pages.rate]
    for value, s, w in zip(values, done.sequence.tolist(), done.window.tolist(), strict=True):
        store_entry(s, ragged, pages, w, value)


def choose(
    queries: torch.Tensor, weights: torch.Tensor, spec: ChoiceSpec, ragged: Ragged, pages: Pages,
    candidates: Selection | None,
) -> tuple[Selection, Selection | None]:  # fmt: skip
    """Choose up to topk entries for each row, and propose candidate blocks where `spec.blocks` asks for them.

    score[e] = sum_h weights[row, h] * heads**-0.5 * relu(q_h . k_e * width**-0.5) over the (position + 1) // rate
    visible entries; queries [rows, heads * width] are rotated, and rounded as keys are where those are records. With
    `candidates` only entries of those blocks count. A block scores as its best visible entry; the block of the newest
    one is always proposed. Lower numbers win ties.
    """
    rows = queries.shape[0]
    chosen, proposed = _empty(queries, spec.topk), _empty(queries, spec.blocks)
    for row in range(rows):
        visible = (int(ragged.positions[row]) + 1) // pages.rate
        heads = queries[row].view(spec.heads, spec.width)
        if pages.are_records:
            heads = values_of(*packed(heads, pages.width))
        keys = entries(int(ragged.sequences[row]), ragged, pages, visible).to(torch.float32)
        scores = weights[row] * spec.heads**-0.5 @ (heads @ keys.T * spec.width**-0.5).relu()
        if spec.blocks and visible:
            padded = torch.nn.functional.pad(scores, (0, -visible % spec.block_entries), value=-torch.inf)
            blocks = padded.view(-1, spec.block_entries).amax(1)
            blocks[-1] = torch.inf
            _keep(proposed, row, _best(blocks, spec.blocks))
        allowed = torch.arange(visible, device=queries.device)
        if candidates is not None:
            blocks = candidates.entries[row, : int(candidates.counts[row])]
            allowed = allowed[torch.isin(allowed // spec.block_entries, blocks)]
        _keep(chosen, row, allowed[_best(scores[allowed], spec.topk)])
    return chosen, proposed if spec.blocks else None


def engram(x: torch.Tensor, projected: torch.Tensor, alive: torch.Tensor, spec: EngramSpec) -> torch.Tensor:
    """Streams x [rows, m, hidden] plus the gated memory; projected [rows, (m + 1) * hidden] holds m keys and the value.

    gate_i = sigmoid(signed square root of d_i), d_i the normed stream times the normed key over sqrt(hidden); 0 where
    `alive` [rows] (bool) is false.
    """
    rows, m, hidden = x.shape
    keys, value = projected[:, : m * hidden].view(rows, m, hidden), projected[:, None, m * hidden :]
    dot = (unit_rms(x, spec.norm_eps) * spec.query_norm * unit_rms(keys, spec.norm_eps) * spec.key_norm).sum(-1)
    dot = dot * hidden**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot)) * alive[:, None]
    return x + gate[..., None] * value


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    return torch.sort(scores, descending=True, stable=True).indices[:count].sort().values


def _empty(queries: torch.Tensor, most: int) -> Selection:
    rows = len(queries)
    return Selection(queries.new_zeros(rows, most, dtype=torch.int32), queries.new_zeros(rows, dtype=torch.int32))


def _keep(selection: Selection, row: int, chosen: torch.Tensor) -> None:
    selection.counts[row] = len(chosen)
    selection.entries[row, : len(chosen)] = chosen.to(torch.int32)


OPS = Csa2Ops(
    hyper_mix=hyper_mix,
    hyper_collapse=hyper_collapse,
    pool=pool,
    norm=norm,
    rotate_heads=rotate_heads,
    store_entries=store_entries,
    choose=choose,
    engram=engram,
)
