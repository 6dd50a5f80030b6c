"""V4.1's tensor names: those transformers writes brought back to the upstream names, and how ranks divide them."""

from __future__ import annotations

from engine.checkpoint.rank import Rule, Split
from engine.checkpoint.sharding import Naming
from engine.families.v4.names import SHARED_RULES


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
        *SHARED_RULES,
        Rule(r"^layers\.\d+\.engram\.embed\.", Split.TABLE),
        Rule(r"^layers\.\d+\.engram\.wkv\.", Split.COLUMNS),
        Rule(r"^layers\.\d+\.engram\.[qk]_weight$", Split.WHOLE),
        Rule(r"^norm\.|^(layers|mtp)\.\d+\.(hc_|attn_norm\.|ffn_norm\.)", Split.WHOLE),
        Rule(r"^(vision|aligner)\.|^image_|^mtp\.", Split.WHOLE),  # small, and not the text engine's
    ),
)
