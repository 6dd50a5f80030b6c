"""The DeepSeek-V4 architecture for training: packed rows in, logits, index loss and expert loads out.

Parameters carry upstream's names (experts stacked), so a state dict is what `export` writes. Computes in the
parameters' dtype; coefficients, routing and soft-maxima in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.nano.attention import BLOCK, Sight, attend_dense
from models.nano.config import NanoConfig, rope_frequencies
from models.nano.indexer import Indexer, Probe
from models.nano.pooling import Compressor, Norm, Rope, rms
from models.nano.sinkhorn import sinkhorn

Attend = Callable[[Tensor, Tensor, Tensor | None, Tensor, Sight], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows. `ids` [batch, tokens] int64; `documents` [batch, tokens / 128] int32, one number a document;
    `probes` [batch, n] query blocks on which the indexer learns (None: no index loss); `dense` 0-dim bool: attend all
    visible entries instead of the chosen ones (a tensor, so that one compiled graph serves both phases)."""

    ids: Tensor
    documents: Tensor
    probes: Tensor | None = None
    dense: Tensor | None = None


class Attention(nn.Module):
    """Window attention plus, by ratio, compressed entries: all of them (HCA) or the indexer's choice (CSA)."""

    def __init__(self, config: NanoConfig, ratio: int, attend: Attend) -> None:
        super().__init__()
        heads, dim = config.num_attention_heads, config.head_dim
        self.config, self.ratio, self.attend = config, ratio, attend
        self.wq_a = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_norm = Norm(config.q_lora_rank)
        self.wq_b = nn.Linear(config.q_lora_rank, heads * dim, bias=False)
        self.wkv = nn.Linear(config.hidden_size, dim, bias=False)
        self.kv_norm = Norm(dim)
        self.wo_a = nn.Linear(heads * dim // config.o_groups, config.o_groups * config.o_lora_rank, bias=False)
        self.wo_b = nn.Linear(config.o_groups * config.o_lora_rank, config.hidden_size, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.compressor = Compressor(config, ratio, dim) if ratio else None
        self.indexer = Indexer(config, ratio) if config.overlaps(ratio) else None

    def forward(self, x: Tensor, rope: Rope, rows: Rows) -> tuple[Tensor, Tensor]:
        """x [batch, tokens, hidden] -> (output of the same shape, index loss)."""
        config, eps = self.config, self.config.rms_norm_eps
        qr = self.q_norm(self.wq_a(x), eps)
        q = self.wq_b(qr).unflatten(-1, (config.num_attention_heads, config.head_dim)).transpose(1, 2)
        q = rope.turn(rms(q, eps))
        kv = rope.turn(self.kv_norm(self.wkv(x), eps))
        entries = None if self.compressor is None else self.compressor(x, rope, rows.documents)
        sight, loss = Sight(rows.documents, config.sliding_window, self.ratio), x.new_zeros((), dtype=torch.float32)
        if self.indexer is None or entries is None:
            out, _ = self.attend(q, kv, entries, self.attn_sink, sight)
        else:
            keys = self.indexer.keys(x, rope, rows.documents)
            chosen = self.indexer.choose(x, qr, keys, rope, sight)
            chosen = chosen if rows.dense is None else chosen | rows.dense
            sight = Sight(rows.documents, config.sliding_window, self.ratio, chosen)
            out, total = self.attend(q, kv, entries, self.attn_sink, sight)
            if rows.probes is not None:
                loss = self.indexer.loss(x, qr, keys, rope, sight, Probe(rows.probes, q, entries, total))
        return self._project(rope.turn(out, -1.0).transpose(1, 2)), loss

    def _project(self, out: Tensor) -> Tensor:
        groups = self.config.o_groups
        grouped = out.flatten(2).unflatten(-1, (groups, -1))
        low = torch.einsum("btgd,grd->btgr", grouped, self.wo_a.weight.unflatten(0, (groups, -1)))
        mixed: Tensor = self.wo_b(low.flatten(2))
        return mixed


class Stack(nn.Module):
    """One matrix per expert, [experts, out, in]."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns))


class Experts(nn.Module):
    """Routed experts. All run on all tokens and unrouted ones weigh zero: at this width that beats gathering."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        number, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.limit = config.swiglu_limit
        self.w1, self.w3 = Stack(number, inner, hidden), Stack(number, inner, hidden)
        self.w2 = Stack(number, hidden, inner)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [batch, tokens, hidden], weights [batch, tokens, experts]."""
        gate = F.linear(x, self.w1.weight.flatten(0, 1))
        up = F.linear(x, self.w3.weight.flatten(0, 1))
        inner = F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)
        inner = inner.unflatten(-1, (weights.shape[-1], -1)) * weights.to(x.dtype)[..., None]
        return F.linear(inner.flatten(2), self.w2.weight.permute(1, 0, 2).flatten(1))


class Shared(nn.Module):
    """The shared expert."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        inner, hidden, self.limit = config.moe_intermediate_size, config.hidden_size, config.swiglu_limit
        self.w1, self.w3 = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.w3(x).clamp(-self.limit, self.limit)
        out: Tensor = self.w2(F.silu(self.w1(x).clamp(max=self.limit)) * up)
        return out


class Gate(nn.Module):
    """sqrt-softplus routing: by token id in hash layers, else the top of scores plus a balancing bias."""

    def __init__(self, config: NanoConfig, hashed: bool) -> None:
        super().__init__()
        experts, self.chosen = config.n_routed_experts, config.num_experts_per_tok
        self.scaling, self.hashed = config.routed_scaling_factor, hashed
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        if hashed:
            self.tid2eid: Tensor
            self.register_buffer("tid2eid", torch.zeros(config.vocab_size, self.chosen, dtype=torch.int64))
        else:
            self.bias: Tensor
            self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [batch, tokens, experts] with zeros for experts not taken, load [experts])."""
        score = F.softplus(F.linear(x.float(), self.weight.float())).sqrt()
        if self.hashed:
            taken = (self.tid2eid[ids][..., None, :] == torch.arange(score.shape[-1], device=x.device)[:, None]).any(-1)
        else:
            taken = self._top(score + self.bias)
        kept = torch.where(taken, score, 0.0)
        weights = kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.scaling
        return weights, taken.float().flatten(0, -2).mean(0)

    def _top(self, score: Tensor) -> Tensor:
        """The `chosen` best of each row as a mask, by counting better ones (ties to the lower expert)."""
        order = torch.arange(score.shape[-1], device=score.device)
        mine, other = score[..., :, None], score[..., None, :]
        better = (other > mine) | ((other == mine) & (order[None, :] < order[:, None]))
        return better.sum(-1) < self.chosen


class Feed(nn.Module):
    """Mixture of experts: routed plus shared."""

    def __init__(self, config: NanoConfig, hashed: bool) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = Gate(config, hashed), Experts(config), Shared(config)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        weights, load = self.gate(x, ids)
        return self.experts(x, weights) + self.shared_experts(x), load


def unit(streams: Tensor, eps: float) -> Tensor:
    """1 / RMS over all streams of a token, float32 [batch, tokens, 1]."""
    return torch.rsqrt(streams.float().square().mean(-1, keepdim=True) + eps)


class Layer(nn.Module):
    """One block: attention and experts, each behind an mHC site."""

    def __init__(self, config: NanoConfig, number: int, attend: Attend) -> None:
        super().__init__()
        self.config, self.m = config, config.hc_mult
        self.attn = Attention(config, config.compress_ratios[number], attend)
        self.ffn = Feed(config, number < config.num_hash_layers)
        self.attn_norm, self.ffn_norm = Norm(config.hidden_size), Norm(config.hidden_size)
        for site in ("attn", "ffn"):
            outputs, width = (2 + self.m) * self.m, self.m * config.hidden_size
            self.register_parameter(f"hc_{site}_fn", nn.Parameter(torch.empty(outputs, width)))
            self.register_parameter(f"hc_{site}_base", nn.Parameter(torch.zeros(outputs)))
            self.register_parameter(f"hc_{site}_scale", nn.Parameter(torch.ones(3)))

    def forward(self, streams: Tensor, rope: Rope, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """streams [batch, tokens, m, hidden] -> (streams, index loss, expert load)."""
        x, post, mix = self._enter(streams, "attn")
        out, loss = self.attn(self.attn_norm(x, self.config.rms_norm_eps), rope, rows)
        streams = self._leave(streams, out, post, mix)
        x, post, mix = self._enter(streams, "ffn")
        out, load = self.ffn(self.ffn_norm(x, self.config.rms_norm_eps), rows.ids)
        return self._leave(streams, out, post, mix), loss, load

    def _enter(self, streams: Tensor, site: str) -> tuple[Tensor, Tensor, Tensor]:
        m, eps = self.m, self.config.hc_eps
        fn, base, scale = (getattr(self, f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        flat = streams.flatten(2)
        z = F.linear(flat, fn.to(flat.dtype)).float() * unit(flat, self.config.rms_norm_eps)
        pre = torch.sigmoid(z[..., :m] * scale[0] + base[:m]) + eps
        post = 2 * torch.sigmoid(z[..., m : 2 * m] * scale[1] + base[m : 2 * m])
        logits = (z[..., 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m))
        mix = sinkhorn(logits, self.config.hc_sinkhorn_iters, eps)
        return (pre[..., None] * streams).sum(2).to(streams.dtype), post, mix

    @staticmethod
    def _leave(streams: Tensor, out: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        mixed = (mix[..., None] * streams[:, :, :, None]).sum(2)
        return (post[..., None] * out[:, :, None] + mixed).to(streams.dtype)


class Nano(nn.Module):
    """The whole model. `attend` is the attention backend."""

    def __init__(self, config: NanoConfig, attend: Attend = attend_dense) -> None:
        super().__init__()
        self.config = config
        self._ropes: tuple[Rope, Rope] | None = None
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number, attend) for number in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.hc_head_fn = nn.Parameter(torch.empty(config.hc_mult, config.hc_mult * config.hidden_size))
        self.hc_head_base = nn.Parameter(torch.zeros(config.hc_mult))
        self.hc_head_scale = nn.Parameter(torch.ones(1))

    def blocks(self) -> list[Layer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def ropes(self, tokens: int, device: torch.device) -> tuple[Rope, Rope]:
        """Main and compress tables for positions 0..tokens-1, kept for the last length asked."""
        if self._ropes is None or self._ropes[0].cos.shape[0] != tokens or self._ropes[0].cos.device != device:
            self._ropes = self._make_ropes(tokens, device)
        return self._ropes

    def _make_ropes(self, tokens: int, device: torch.device) -> tuple[Rope, Rope]:
        place = torch.arange(tokens, device=device, dtype=torch.float32)[:, None]
        main, compress = (
            place * torch.tensor(rope_frequencies(self.config, each), device=device) for each in (False, True)
        )
        return Rope(main.cos(), main.sin()), Rope(compress.cos(), compress.sin())

    def forward(self, rows: Rows) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(hidden states before the head [batch, tokens, hidden], index loss, expert load per layer).

        `tokens` must be a multiple of 128."""
        if rows.ids.shape[1] % BLOCK:
            raise ValueError(f"rows must be multiples of {BLOCK} tokens, got {rows.ids.shape[1]}")
        main, compress = self.ropes(rows.ids.shape[1], rows.ids.device)
        streams = self.embed(rows.ids).to(self.head.weight.dtype)[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        streams, loss, loads = streams.contiguous(), torch.zeros((), device=rows.ids.device), []
        for layer in self.blocks():
            streams, index_loss, load = layer(streams, compress if layer.attn.ratio else main, rows)
            loss = loss + index_loss
            loads.append(load)
        return self._collapse(streams), loss, loads

    def _collapse(self, streams: Tensor) -> Tensor:
        flat = streams.flatten(2)
        z = F.linear(flat, self.hc_head_fn.to(flat.dtype)).float() * unit(flat, self.config.rms_norm_eps)
        weights = torch.sigmoid(z * self.hc_head_scale + self.hc_head_base) + self.config.hc_eps
        out: Tensor = self.norm((weights[..., None] * streams).sum(2).to(streams.dtype), self.config.rms_norm_eps)
        return out

    def logits(self, rows: Rows) -> Tensor:
        """[batch, tokens, vocabulary]."""
        out: Tensor = self.head(self(rows)[0])
        return out
