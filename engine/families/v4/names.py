"""V4's tensor names: transformers' saved hybrid brought back to the upstream names, and how ranks divide them."""

from __future__ import annotations

import re

from engine.checkpoint.rank import Rule, Split
from engine.checkpoint.sharding import Naming

_ATTENTION_NORM = re.compile(r"^((?:layers|mtp)\.\d+\.attn)\.norm\.")


def upstream(stored: str) -> str:
    """The upstream name of a stored tensor; names that are upstream already stay."""
    name = stored.removeprefix("model.")
    if name.startswith("embed_tokens."):
        return name.replace("embed_tokens.", "embed.", 1)
    if name.startswith("lm_head."):
        return name.replace("lm_head.", "head.", 1)
    if name.startswith("hc_head.hc_"):
        return name.replace("hc_head.hc_", "hc_head_", 1)
    # Saving maps the key norm back to a name that upstream gives to nothing else.
    return _ATTENTION_NORM.sub(r"\1.kv_norm.", name)


# Heads are rows of what makes queries and columns of what joins them, output groups likewise; the one key has no heads.
# V4.1 names these parts alike.
SHARED_RULES = (
    Rule(r"^(embed|head)\.", Split.ROWS),
    Rule(r"^(layers|mtp)\.\d+\.ffn\.experts\.\d+\.", Split.EXPERT),
    Rule(r"^(layers|mtp)\.\d+\.ffn\.shared_experts\.w[13]\.", Split.ROWS),
    Rule(r"^(layers|mtp)\.\d+\.ffn\.shared_experts\.w2\.", Split.COLUMNS),
    Rule(r"^(layers|mtp)\.\d+\.ffn\.gate\.", Split.WHOLE),
    Rule(r"^(layers|mtp)\.\d+\.attn\.(wq_b|wo_a|attn_sink)", Split.ROWS),
    Rule(r"^(layers|mtp)\.\d+\.attn\.wo_b\.", Split.COLUMNS),
    Rule(r"^(layers|mtp)\.\d+\.attn\.(wq_a|wkv|q_norm|kv_norm|compressor|indexer)\.", Split.WHOLE),
)
NAMING = Naming(
    upstream,
    (
        *SHARED_RULES,
        Rule(r"^norm\.|^hc_head_|^(layers|mtp)\.\d+\.(hc_|attn_norm\.|ffn_norm\.)", Split.WHOLE),
        Rule(r"^mtp\.\d+\.(enorm|hnorm|norm|e_proj|h_proj)\.", Split.WHOLE),
    ),
)
