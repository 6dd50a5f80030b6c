"""Attention over a window and compressed entries of packed documents, with a sink. Two forms: dense and chunked.

Documents start on blocks of 128 tokens, so one document number per block describes a packed row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True, slots=True)
class Sight:
    """What queries may see. `documents` [batch, blocks] int32; `ratio` tokens an entry (0: no entries);
    `chosen` [batch, tokens, entries] bool restricts entries further (the indexer's choice)."""

    documents: Tensor
    window: int
    ratio: int
    chosen: Tensor | None = None

    def entry_visible(self, batch: Tensor, query: Tensor, entry: Tensor) -> Tensor:
        """Whether the whole window of an entry lies before or at the query, in its document. Broadcasting indices."""
        first = entry * self.ratio
        same = self.documents[batch, first // BLOCK] == self.documents[batch, query // BLOCK]
        return same & (first + self.ratio <= query + 1)

    def window_visible(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = self.documents[batch, key // BLOCK] == self.documents[batch, query // BLOCK]
        return same & (key <= query) & (query - key < self.window)


def dense_entry_mask(sight: Sight, tokens: int, entries: int) -> Tensor:
    """[batch, tokens, entries] bool, `chosen` included."""
    device = sight.documents.device
    batch = torch.arange(sight.documents.shape[0], device=device)[:, None, None]
    query = torch.arange(tokens, device=device)[None, :, None]
    visible = sight.entry_visible(batch, query, torch.arange(entries, device=device)[None, None])
    return visible if sight.chosen is None else visible & sight.chosen


def attend_dense(q: Tensor, kv: Tensor, entries: Tensor | None, sink: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """q [batch, heads, tokens, dim], kv [batch, tokens, dim], entries [batch, entries, dim] -> (output, log-sum-exp
    [batch, heads, tokens], sink included). Materialises all scores: for tests and short rows."""
    tokens, device = q.shape[2], q.device
    batch = torch.arange(q.shape[0], device=device)[:, None, None]
    place = torch.arange(tokens, device=device)
    visible = sight.window_visible(batch, place[None, :, None], place[None, None])
    if entries is not None:
        visible = torch.cat((visible, dense_entry_mask(sight, tokens, entries.shape[1])), -1)
        kv = torch.cat((kv, entries), 1)
    scores = torch.einsum("bhtd,bsd->bhts", q, kv).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    scores = torch.cat((scores, sink.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    total = scores.logsumexp(-1)
    weights = (scores[..., :-1] - total[..., None]).exp().to(kv.dtype)
    return torch.einsum("bhts,bsd->bhtd", weights, kv), total


HIDDEN = -1e30  # finite: a row without visible entries must not make the gradient NaN


def _window_scores(q: Tensor, near: Tensor, sight: Sight) -> Tensor:
    """q [batch, blocks, heads, 128, dim] against its own and the previous block -> [batch, blocks, heads, 128, 256]."""
    scores = torch.einsum("bnhqd,bnkd->bnhqk", q, near).float() * q.shape[-1] ** -0.5
    query = torch.arange(BLOCK, device=q.device)[:, None]
    key = torch.arange(2 * BLOCK, device=q.device)[None] - BLOCK
    visible = (key <= query) & (query - key < sight.window)
    joined = torch.zeros_like(sight.documents, dtype=torch.bool)
    joined[:, 1:] = sight.documents[:, 1:] == sight.documents[:, :-1]
    visible = visible & ((key >= 0) | joined[:, :, None, None])
    return scores.masked_fill(~visible[:, :, None], HIDDEN)


def attend_chunked(q: Tensor, kv: Tensor, entries: Tensor | None, sink: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """As `attend_dense`; the window costs 256 keys a query however long the row. Compiles into few plain kernels."""
    blocks, heads = q.shape[2] // BLOCK, q.shape[1]
    chunks = q.unflatten(2, (blocks, BLOCK)).transpose(1, 2)
    own = kv.unflatten(1, (blocks, BLOCK))
    near = torch.cat((torch.cat((torch.zeros_like(own[:, :1]), own[:, :-1]), 1), own), 2)
    scores = _window_scores(chunks, near, sight)
    total = scores.logsumexp(-1).transpose(1, 2).flatten(2)
    if entries is not None:
        far = torch.einsum("bhtd,bsd->bhts", q, entries).float() * q.shape[-1] ** -0.5
        far = far.masked_fill(~dense_entry_mask(sight, q.shape[2], entries.shape[1])[:, None], HIDDEN)
        total = torch.logaddexp(total, far.logsumexp(-1))
    total = torch.logaddexp(total, sink.float().view(1, heads, 1))
    each = total.unflatten(2, (blocks, BLOCK)).transpose(1, 2)[..., None]
    out = torch.einsum("bnhqk,bnkd->bnhqd", (scores - each).exp().to(kv.dtype), near).transpose(1, 2).flatten(2, 3)
    if entries is not None:
        out = out + torch.einsum("bhts,bsd->bhtd", (far - total[..., None]).exp().to(kv.dtype), entries)
    return out, total
