"""V4.1's tensor names: those transformers writes brought back to the upstream names, and how ranks divide them."""

from __future__ import annotations

from engine.checkpoint.rank import Rule, Split
from engine.checkpoint.sharding import Naming


def upstream(stored: str) -> str:
    """The upstream name of a stored tensor; names that are upstream already stay."""
    name = stored.removeprefix("model.")
    if name.startswith("embed_tokens."):
        return name.replace("embed_tokens.", "embed.", 1)
    return name.replace("lm_head.", "head.", 1) if name.startswith("lm_head.") else name


# Heads and output groups as in V4. A rank looks up the rows of an Engram table that it has; other ranks add theirs.
NAMING = Naming(
    upstream,
    (
        Rule(r"^(embed|head)\.", Split.ROWS),
        Rule(r"^(layers|mtp)\.\d+\.ffn\.experts\.\d+\.", Split.EXPERT),
        Rule(r"^(layers|mtp)\.\d+\.ffn\.shared_experts\.w[13]\.", Split.ROWS),
        Rule(r"^(layers|mtp)\.\d+\.ffn\.shared_experts\.w2\.", Split.COLUMNS),
        Rule(r"^(layers|mtp)\.\d+\.ffn\.gate\.", Split.WHOLE),
        Rule(r"^(layers|mtp)\.\d+\.attn\.(wq_b|wo_a|attn_sink)", Split.ROWS),
        Rule(r"^(layers|mtp)\.\d+\.attn\.wo_b\.", Split.COLUMNS),
        Rule(r"^(layers|mtp)\.\d+\.attn\.(wq_a|wkv|q_norm|kv_norm|compressor|indexer)\.", Split.WHOLE),
        Rule(r"^layers\.\d+\.engram\.embed\.", Split.TABLE),
        Rule(r"^layers\.\d+\.engram\.wkv\.", Split.COLUMNS),
        Rule(r"^layers\.\d+\.engram\.[qk]_weight$", Split.WHOLE),
        Rule(r"^norm\.|^(layers|mtp)\.\d+\.(hc_|attn_norm\.|ffn_norm\.)", Split.WHOLE),
        Rule(r"^(vision|aligner)\.|^image_|^mtp\.", Split.WHOLE),  # small, and not the text engine's
    ),
)
