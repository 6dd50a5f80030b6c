"""The lightning indexer: which entries a query attends, and how it learns that from the attention itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.nano.attention import BLOCK, Sight, dense_entry_mask
from models.nano.config import NanoConfig
from models.nano.pooling import Compressor, Rope


@dataclass(frozen=True, slots=True)
class Probe:
    """What the index loss compares with: query blocks [batch, n], roped queries [batch, heads, tokens, dim],
    entries [batch, entries, dim] and log-sum-exp [batch, heads, tokens] of the attention."""

    blocks: Tensor
    queries: Tensor
    entries: Tensor
    total: Tensor


class Indexer(nn.Module):
    """score[t, s] = sum_h w_h * relu(q_h . k_s * dim^-0.5). Its inputs are detached: only the index loss trains it."""

    def __init__(self, config: NanoConfig, ratio: int) -> None:
        super().__init__()
        self.heads, self.dim, self.top = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        self.compressor = Compressor(config, ratio, self.dim)
        self.rank: Callable[[Tensor], Tensor] | None = None
        """Replaces scores before the choice: how the ablation takes entries by age or at random."""

    def keys(self, x: Tensor, rope: Rope, documents: Tensor) -> Tensor:
        """[batch, entries, dim]."""
        keys: Tensor = self.compressor(x.detach(), rope, documents)
        return keys

    def scores(self, x: Tensor, qr: Tensor, keys: Tensor, rope: Rope) -> Tensor:
        """x [batch, queries, hidden], qr [batch, queries, rank], rope at the queries -> [batch, queries, entries]."""
        q = self.wq_b(qr.detach()).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        products = torch.einsum("bhqd,bsd->bhqs", rope.turn(q), keys).float() * self.dim**-0.5
        weights = self.weights_proj(x.detach()).float() * self.heads**-0.5
        return (products.relu() * weights.transpose(1, 2)[..., None]).sum(1)

    @torch.no_grad()
    def choose(self, x: Tensor, qr: Tensor, keys: Tensor, rope: Rope, sight: Sight) -> Tensor:
        """[batch, tokens, entries] bool: the `index_topk` best visible entries of each query."""
        scores = self.scores(x, qr, keys, rope)
        scores = scores if self.rank is None else self.rank(scores)
        visible = dense_entry_mask(sight, x.shape[1], keys.shape[1])
        scores = scores.masked_fill(~visible, float("-inf"))
        best = scores.topk(min(self.top, keys.shape[1]), -1, sorted=False).indices
        return torch.zeros_like(visible).scatter_(-1, best, True)

    def loss(self, x: Tensor, qr: Tensor, keys: Tensor, rope: Rope, sight: Sight, probe: Probe) -> Tensor:
        """Mean KL(attention summed over heads || softmax of index scores) over visible entries of the probed queries,
        each query weighted by the attention that its entries receive."""
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        places = (probe.blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=x.device)).flatten(1)
        visible = sight.entry_visible(
            batch[..., None], places[..., None], torch.arange(keys.shape[1], device=x.device)[None, None]
        )
        target, mass = self._attention(probe, batch, places, visible)
        at = rope.at(places)
        scores = self.scores(x[batch, places], qr[batch, places], keys, Rope(at.cos[:, None], at.sin[:, None]))
        predicted = scores.masked_fill(~visible, -1e9).log_softmax(-1)
        divergence = (target * (target.clamp_min(1e-20).log() - predicted)).sum(-1)
        return (divergence * mass).sum() / mass.sum().clamp_min(1e-6)

    @torch.no_grad()
    def _attention(self, probe: Probe, batch: Tensor, places: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        queries = probe.queries.transpose(1, 2)[batch, places].transpose(1, 2)
        total = probe.total.transpose(1, 2)[batch, places].transpose(1, 2)
        scores = torch.einsum("bhqd,bsd->bhqs", queries, probe.entries).float() * queries.shape[-1] ** -0.5
        summed = torch.where(visible[:, None], (scores - total[..., None]).exp(), 0.0).sum(1)
        mass = summed.sum(-1)
        return summed / mass.clamp_min(1e-20)[..., None], mass
