"""The MTP block of V3 and V3.2, dense in float64, from the published formulas alone: nothing of the engine."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.support.dense_numbers import Tensors, frequencies, gated, turn, unit


class DenseDraft:
    """`forward(hidden, tokens)`: row t joins the normed hidden[t] with tokens[t], which stands at position t + 1."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, block: int = 0) -> None:
        self.c, self._tensors = config, tensors
        self._prefix = f"model.layers.{config['num_hidden_layers'] + block}."

    def forward(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, vocabulary] and hidden states [T, hidden], not normed."""
        get, eps = self._get, self.c["rms_norm_eps"]
        token = unit(get("embed_tokens.weight")[tokens], eps) * get("enorm.weight")
        before = unit(hidden.double(), eps) * get("hnorm.weight")
        x = torch.cat([token, before], 1) @ get("eh_proj.weight").T
        x = x + self._attention(unit(x, eps) * get("input_layernorm.weight"))
        x = x + self._experts(unit(x, eps) * get("post_attention_layernorm.weight"))
        return (unit(x, eps) * get("shared_head.norm.weight")) @ get("shared_head.head.weight").T, x

    def model_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model itself answers from these states."""
        return hidden.double() @ self._tensors["lm_head.weight"].T

    def _get(self, name: str) -> torch.Tensor:
        return self._tensors[self._prefix + name]

    def _angles(self, rows: int) -> torch.Tensor:
        c = self.c
        return torch.arange(1, rows + 1).double()[:, None] * frequencies(
            c["qk_rope_head_dim"], c["rope_theta"], c["rope_scaling"]
        )

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        c, get = self.c, self._get
        rows, heads, still, turning = len(x), c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        rank, value, angles = c["kv_lora_rank"], c["v_head_dim"], self._angles(len(x))
        latent = unit(x @ get("self_attn.q_a_proj.weight").T, 1e-6) * get("self_attn.q_a_layernorm.weight")
        query = (latent @ get("self_attn.q_b_proj.weight").T).view(rows, heads, still + turning)
        both = x @ get("self_attn.kv_a_proj_with_mqa.weight").T
        cached = unit(both[:, :rank], 1e-6) * get("self_attn.kv_a_layernorm.weight")
        expanded = (cached @ get("self_attn.kv_b_proj.weight").T).view(rows, heads, still + value)
        scores = torch.einsum("thc,shc->hts", query[..., :still], expanded[..., :still])
        turned = turn(query[..., still:], angles[:, None])
        scores = scores + torch.einsum("thc,sc->hts", turned, turn(both[:, rank:], angles))
        gain = 0.1 * c["rope_scaling"]["mscale_all_dim"] * math.log(c["rope_scaling"]["factor"]) + 1
        scores = scores * (still + turning) ** -0.5 * gain**2
        weights = torch.softmax(scores.masked_fill(~self._seen(x, latent), -torch.inf), -1)
        mixed = torch.einsum("hts,shv->thv", weights, expanded[..., still:]).flatten(1)
        return mixed @ get("self_attn.o_proj.weight").T

    def _seen(self, x: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """bool [T, T]: earlier rows, of which the indexer keeps the best where the model has one."""
        c, get, rows = self.c, self._get, len(x)
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        if "index_topk" not in c:
            return causal
        heads, width, turning, angles = (
            c["index_n_heads"],
            c["index_head_dim"],
            c["qk_rope_head_dim"],
            self._angles(rows),
        )
        query = (latent @ get("self_attn.indexer.wq_b.weight").T).view(rows, heads, width)
        norm = (get("self_attn.indexer.k_norm.weight"), get("self_attn.indexer.k_norm.bias"))
        key = torch.nn.functional.layer_norm(x @ get("self_attn.indexer.wk.weight").T, (width,), *norm, 1e-6)

        def halves(v: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            first, second = v[..., : turning // 2], v[..., turning // 2 : turning]
            cos, sin = at.cos(), at.sin()
            return torch.cat([first * cos - second * sin, second * cos + first * sin, v[..., turning:]], -1)

        products = torch.einsum("thc,sc->ths", halves(query, angles[:, None]), halves(key, angles)) * width**-0.5
        weights = x @ get("self_attn.indexer.weights_proj.weight").T * heads**-0.5
        scores = torch.einsum("th,ths->ts", weights, products.relu()).masked_fill(~causal, -torch.inf)
        kept = torch.zeros_like(causal).scatter_(1, scores.topk(min(c["index_topk"], rows), 1).indices, True)
        return kept & causal

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        c, get = self.c, self._get
        scores = torch.sigmoid(x @ get("mlp.gate.weight").T)
        biased = scores + get("mlp.gate.e_score_correction_bias")
        groups = biased.view(len(x), c["n_group"], -1)
        best = groups.topk(2, -1).values.sum(-1).topk(c["topk_group"]).indices
        kept = torch.zeros(len(x), c["n_group"], dtype=torch.bool).scatter_(1, best, True)
        masked = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        chosen = masked.topk(c["num_experts_per_tok"]).indices
        weights = torch.gather(scores, 1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * c["routed_scaling_factor"]

        def expert(name: str, rows: torch.Tensor) -> torch.Tensor:
            parts = (get(f"mlp.{name}.{part}_proj.weight") for part in ("gate", "up", "down"))
            return gated(rows, *parts, math.inf)

        out = expert("shared_experts", x)
        for row, (experts, weight) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for e, w in zip(experts, weight, strict=True):
                out[row] += w * expert(f"experts.{e}", x[row : row + 1])[0]
        return out
