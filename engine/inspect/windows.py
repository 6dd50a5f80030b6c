"""What each policy for window state would cost a model at a prefix hit. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import InvalidParameter
from engine.layout import Layout
from engine.windows import WINDOW_STATES, served


@dataclass(frozen=True, slots=True)
class WindowChoice:
    """One policy. `refused` says why the model cannot be served so, and is empty where it can."""

    window_state: str
    default: bool
    anchor_bytes: int  # kept for every place where a hit may end; 0: hits may end at any block
    recomputed_tokens: int  # of every hit
    refused: str


def window_choices(layout: Layout, max_context_tokens: int) -> tuple[WindowChoice, ...]:
    """Every policy but "auto", for records as `layout` has them; nothing for a model without window groups."""
    if not layout.windows:
        return ()
    return tuple(_choice(layout, name, max_context_tokens) for name in WINDOW_STATES if name != "auto")


def _choice(layout: Layout, name: str, max_context_tokens: int) -> WindowChoice:
    default = layout.window_policy == name
    try:
        chosen = served(layout, "auto" if default else name, max_context_tokens)
    except InvalidParameter as error:
        return WindowChoice(name, default, 0, 0, error.message)
    return WindowChoice(name, default, chosen.window_bytes if chosen.anchored else 0, chosen.replay.tokens, "")
