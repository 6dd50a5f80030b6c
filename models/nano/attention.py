"""Attention over a window and compressed entries of packed documents, with a sink. Two backends: dense torch and flex.

Documents start on blocks of 128 tokens, so one document number per block describes a packed row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

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


def _block_mask(sight: Sight, tokens: int, entries: int, mask_mod: Callable[..., Tensor]) -> BlockMask:
    blocks, entry_blocks = tokens // BLOCK, -(-entries // BLOCK)
    documents, device = sight.documents, sight.documents.device
    rows = torch.arange(blocks, device=device)
    near = (rows[:, None] == rows[None]) | ((rows[:, None] == rows[None] + 1) & _same(documents))
    table = near.expand(documents.shape[0], blocks, blocks)
    if entries:
        earlier = _same(documents) & (rows[None] <= rows[:, None])
        blocks_each = sight.ratio  # 128 entries of `ratio` tokens are `ratio` blocks of tokens
        padded = torch.nn.functional.pad(earlier.to(torch.int8), (0, entry_blocks * blocks_each - blocks))
        table = torch.cat((table, padded.unflatten(-1, (entry_blocks, blocks_each)).amax(-1).bool()), -1)
    number = table.sum(-1, dtype=torch.int32)[:, None]
    order = table.to(torch.int8).argsort(-1, descending=True, stable=True).to(torch.int32)[:, None]
    lengths = (tokens, tokens + entry_blocks * BLOCK)
    return BlockMask.from_kv_blocks(number, order, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths)


def _same(documents: Tensor) -> Tensor:
    return documents[:, :, None] == documents[:, None]


def attend_flex(q: Tensor, kv: Tensor, entries: Tensor | None, sink: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """As `attend_dense`, block-sparse and fused; for compiled code on a GPU."""
    tokens, number = q.shape[2], 0 if entries is None else entries.shape[1]
    if entries is not None:
        kv = torch.cat((kv, torch.nn.functional.pad(entries, (0, 0, 0, -number % BLOCK))), 1)

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key.clamp(max=tokens - 1)
        inside = (key < tokens) & sight.window_visible(b, query, place)
        if not number:
            return inside
        entry = (key - tokens).clamp(0, number - 1)
        seen = (key >= tokens) & (key < tokens + number) & sight.entry_visible(b, query, entry)
        if sight.chosen is not None:
            seen = seen & sight.chosen[b, query, entry]
        return inside | seen

    mask = _block_mask(sight, tokens, number, visible)
    key = kv[:, None]
    out, total = flex_attention(q, key, key, block_mask=mask, enable_gqa=True, return_lse=True)
    with_sink = torch.logaddexp(total, sink.float()[None, :, None])
    return out * torch.exp(total - with_sink)[..., None].to(out.dtype), with_sink
