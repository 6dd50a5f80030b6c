"""V4.1's tensor names: those transformers writes brought back to the upstream names. Knows names only."""

from __future__ import annotations


def upstream(stored: str) -> str:
    """The upstream name of a stored tensor; names that are upstream already stay."""
    name = stored.removeprefix("model.")
    if name.startswith("embed_tokens."):
        return name.replace("embed_tokens.", "embed.", 1)
    return name.replace("lm_head.", "head.", 1) if name.startswith("lm_head.") else name
