"""V4's tensor names: transformers' saved hybrid brought back to the upstream names. Knows names only."""

from __future__ import annotations

import re

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
