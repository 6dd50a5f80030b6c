"""V4's MTP block, dense in float64, from the published formulas alone: no cache, no chunks, nothing of the engine."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.dense_numbers import Tensors, frequencies, gated, turn, unit


class DenseDraft:
    """`forward(streams, tokens)`: row t joins streams[t] with tokens[t], the token after it, at position t + 1."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, block: int = 0) -> None:
        self.c, self._tensors, self._prefix = config, tensors, f"mtp.{block}."

    def forward(self, streams: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, vocabulary] and streams [T, m, hidden]."""
        eps, get = self.c["rms_norm_eps"], self._get
        token = unit(self._tensors["embed.weight"][tokens], eps) * get("enorm.weight")
        before = unit(streams.double(), eps) * get("hnorm.weight")
        x = before @ get("h_proj.weight").T + (token @ get("e_proj.weight").T)[:, None]
        x = self._site(x, "attn", self._attention)
        x = self._site(x, "ffn", self._experts)
        return self._head(x, self._prefix), x

    def model_logits(self, streams: torch.Tensor) -> torch.Tensor:
        """What the model itself answers from these streams."""
        return self._head(streams.double(), "")

    def _head(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        fn, base, scale = (self._tensors[f"{prefix}hc_head_{part}"] for part in ("fn", "base", "scale"))
        flat = unit(x.flatten(1), self.c["rms_norm_eps"]) @ fn.T
        pre = torch.sigmoid(flat * scale + base) + self.c["hc_eps"]
        y = unit((pre[..., None] * x).sum(1), self.c["rms_norm_eps"]) * self._tensors[f"{prefix}norm.weight"]
        return y @ self._tensors["head.weight"].T

    def _get(self, name: str) -> torch.Tensor:
        return self._tensors[self._prefix + name]

    def _site(self, x: torch.Tensor, name: str, block: Any) -> torch.Tensor:
        m, eps, get = self.c["hc_mult"], self.c["hc_eps"], self._get
        z = unit(x.flatten(1), self.c["rms_norm_eps"]) @ get(f"hc_{name}_fn").T
        base, scale = get(f"hc_{name}_base"), get(f"hc_{name}_scale")
        pre = torch.sigmoid(z[:, :m] * scale[0] + base[:m]) + eps
        post = 2 * torch.sigmoid(z[:, m : 2 * m] * scale[1] + base[m : 2 * m])
        comb = torch.softmax((z[:, 2 * m :] * scale[2] + base[2 * m :]).view(-1, m, m), -1) + eps
        for step in range(self.c["hc_sinkhorn_iters"]):
            if step:
                comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        inner = unit((pre[..., None] * x).sum(1), self.c["rms_norm_eps"]) * get(f"{name}_norm.weight")
        return post[..., None] * block(inner)[:, None] + comb.transpose(1, 2) @ x

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        c, get, eps = self.c, self._get, self.c["rms_norm_eps"]
        rows, heads, width, turning = len(x), c["num_attention_heads"], c["head_dim"], c["qk_rope_head_dim"]
        positions = torch.arange(1, rows + 1).double()
        angles = positions[:, None] * frequencies(turning, c["rope_theta"], None)
        latent = unit(x @ get("attn.wq_a.weight").T, eps) * get("attn.q_norm.weight")
        query = unit((latent @ get("attn.wq_b.weight").T).view(rows, heads, width), eps)
        query = torch.cat([query[..., :-turning], turn(query[..., -turning:], angles[:, None])], -1)
        key = unit(x @ get("attn.wkv.weight").T, eps) * get("attn.kv_norm.weight")
        key = torch.cat([key[:, :-turning], turn(key[:, -turning:], angles)], -1)
        scores = torch.einsum("thc,sc->ths", query, key) * width**-0.5
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= c["sliding_window"])
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        sink = get("attn.attn_sink").expand(rows, heads)[..., None]
        mixed = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1] @ key
        mixed = torch.cat([mixed[..., :-turning], turn(mixed[..., -turning:], -angles[:, None])], -1)
        groups = mixed.reshape(rows, c["o_groups"], -1)
        down = get("attn.wo_a.weight").view(c["o_groups"], c["o_lora_rank"], -1)
        return torch.einsum("tgi,goi->tgo", groups, down).flatten(1) @ get("attn.wo_b.weight").T

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        c, get, limit = self.c, self._get, self.c["swiglu_limit"]
        scores = torch.sqrt(torch.nn.functional.softplus(x @ get("ffn.gate.weight").T))
        best = (scores + get("ffn.gate.bias")).topk(c["num_experts_per_tok"]).indices
        weights = torch.gather(scores, 1, best)
        weights = weights / weights.sum(1, keepdim=True) * c["routed_scaling_factor"]

        def expert(name: str, rows: torch.Tensor) -> torch.Tensor:
            return gated(rows, *(get(f"ffn.{name}.{part}.weight") for part in ("w1", "w3", "w2")), limit)

        out = expert("shared_experts", x)
        for row, (chosen, weight) in enumerate(zip(best.tolist(), weights, strict=True)):
            for e, w in zip(chosen, weight, strict=True):
                out[row] += w * expert(f"experts.{e}", x[row : row + 1])[0]
        return out
