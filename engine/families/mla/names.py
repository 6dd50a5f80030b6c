"""Tensor names of V2, V3 and V3.2, and how ranks divide them. Upstream and transformers agree but for one suffix."""

from __future__ import annotations

from engine.checkpoint.rank import Rule, Split
from engine.checkpoint.sharding import Naming


def upstream(stored: str) -> str:
    """The name the reader asks for: `model.` is dropped, and a block scale is called as in V4."""
    name = stored.removeprefix("model.")
    return name.removesuffix("weight_scale_inv") + "scale" if name.endswith(".weight_scale_inv") else name


# Heads are rows of what makes queries, keys and values and columns of what joins them; a latent has no heads.
NAMING = Naming(
    upstream,
    (
        Rule(r"^(layers\.\d+\.)?embed_tokens\.", Split.ROWS),
        Rule(r"^lm_head\.|^layers\.\d+\.shared_head\.head\.", Split.ROWS),
        Rule(r"^layers\.\d+\.mlp\.experts\.\d+\.", Split.EXPERT),
        Rule(r"^layers\.\d+\.mlp\.(shared_experts\.)?(gate|up)_proj\.", Split.ROWS),
        Rule(r"^layers\.\d+\.mlp\.(shared_experts\.)?down_proj\.", Split.COLUMNS),
        Rule(r"^layers\.\d+\.mlp\.gate\.", Split.WHOLE),
        Rule(r"^layers\.\d+\.self_attn\.(q_proj|q_b_proj|kv_b_proj)\.", Split.ROWS),
        Rule(r"^layers\.\d+\.self_attn\.o_proj\.", Split.COLUMNS),
        Rule(r"^layers\.\d+\.self_attn\.(q_a|kv_a|indexer\.)", Split.WHOLE),
        Rule(r"^norm\.|^layers\.\d+\.(input_layernorm|post_attention_layernorm)\.", Split.WHOLE),
        Rule(r"^layers\.\d+\.(enorm|hnorm|eh_proj|shared_head\.norm)\.", Split.WHOLE),
    ),
)
