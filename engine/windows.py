"""Window state at a prefix hit: the three policies, and which of them a layout can be served with. Knows no tensors.

`exact` keeps window rows in anchors, and hits end at one. `replay` recomputes one window before the end of a hit:
approximate by design. `recompute` recomputes as many windows as there are layers, which is exact. `auto` is what the
family and the checkpoint's `serving` section say.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import InvalidParameter
from engine.layout import EXACT, Layout, ReplayPolicy

WINDOW_STATES = ("auto", "exact", "replay", "recompute")
WINDOW = "window"  # the group of attention windows, in every family that has window groups
_FIELD = "window_state"


def served(layout: Layout, window_state: str, max_context_tokens: int) -> Layout:
    """`layout` under the policy `window_state`, one of WINDOW_STATES.

    Raises InvalidParameter for a model that leaves no choice, and for a policy that it cannot be served with.
    """
    if window_state == "auto":
        return layout
    if not layout.windows:
        raise InvalidParameter(_FIELD, "this model caches no window state: any prefix hit is exact", "leave it at auto")
    trimmed = layout.replay.decoder or layout.replay.handoff
    if trimmed and window_state != "replay":
        message = f"{window_state!r} needs every row of a prompt in every layer, which `serving` in config.json forgoes"
        raise InvalidParameter(_FIELD, message, "use auto or replay, or take decoder_replay and handoff_replay out")
    policy = policy_of(layout, window_state)
    if policy.tokens >= max_context_tokens:
        message = f"{window_state!r} recomputes {policy.tokens} tokens of a hit, the context holds {max_context_tokens}"
        raise InvalidParameter(_FIELD, message, "use exact, for no hit could ever help")
    _require_refilled(layout, policy, window_state)
    return replace(layout, replay=policy)


def _require_refilled(layout: Layout, policy: ReplayPolicy, window_state: str) -> None:
    """Rows that a replay does not reach would be those that the slot's last sequence left."""
    for group in layout.windows:
        rows = group.entries - layout.max_rollback
        if 0 < policy.tokens < rows:
            message = f"{window_state!r} recomputes {policy.tokens} tokens of a hit, {group.name} holds rows of {rows}"
            raise InvalidParameter(_FIELD, message, "use exact")


def policy_of(layout: Layout, window_state: str) -> ReplayPolicy:
    """What `window_state` means for a layout with window groups."""
    if window_state == "exact":
        return EXACT
    if window_state == "recompute":
        return ReplayPolicy(window_tokens(layout) * layout.group(WINDOW).layers, stacked=True)
    return replace(layout.replay, tokens=window_tokens(layout), stacked=False)


def window_tokens(layout: Layout) -> int:
    """Tokens of one attention window."""
    return layout.group(WINDOW).entries - layout.max_rollback
