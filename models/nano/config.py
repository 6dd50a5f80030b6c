"""Architecture of nano: the upstream config.json keys as one frozen value. Knows no tensors."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN parameters of the compress rope table (DeepSeek-V4 `rope_scaling`)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class NanoConfig:
    """The keys of DeepSeek-V4's config.json that the training modules need."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    compress_rope_theta: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    yarn: Yarn
    vocab_size: int

    def overlaps(self, ratio: int) -> bool:
        """Whether a compressor of this ratio pools two windows (CSA) or one (HCA)."""
        return 0 < ratio < self.sliding_window


def load_config(path: Path = HERE / "config.json") -> NanoConfig:
    """Read an upstream-style config.json. Raises KeyError naming the first missing key."""
    raw = json.loads(path.read_text())
    scaling = raw["rope_scaling"]
    yarn = Yarn(
        float(scaling["factor"]),
        float(scaling["beta_fast"]),
        float(scaling["beta_slow"]),
        int(scaling["original_max_position_embeddings"]),
    )
    names = [name for name in NanoConfig.__slots__ if name not in ("yarn", "compress_ratios")]
    ratios = tuple(raw["compress_ratios"][: raw["num_hidden_layers"]])
    return NanoConfig(**{name: raw[name] for name in names}, yarn=yarn, compress_ratios=ratios)


def rope_frequencies(config: NanoConfig, compress: bool) -> list[float]:
    """Angle per position of each rope pair: the main table, or the YaRN-scaled compress table (amplitude 1)."""
    rope_dim = config.qk_rope_head_dim
    base = config.compress_rope_theta if compress else config.rope_theta
    plain = [base ** (-2 * pair / rope_dim) for pair in range(rope_dim // 2)]
    if not compress:
        return plain

    def pair_of(rotations: float) -> float:
        span = config.yarn.original_positions / (rotations * 2 * math.pi)
        return rope_dim * math.log(span) / (2 * math.log(base))

    low = max(math.floor(pair_of(config.yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(config.yarn.beta_slow)), rope_dim - 1)
    ramps = [min(max((pair - low) / max(high - low, 1e-3), 0.0), 1.0) for pair in range(rope_dim // 2)]
    return [f / config.yarn.factor * r + f * (1 - r) for f, r in zip(plain, ramps, strict=True)]
