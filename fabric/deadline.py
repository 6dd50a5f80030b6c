"""How much time the current call has left. Knows a monotonic instant per task; calls made from it inherit the rest."""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Protocol

from fabric.errors import DeadlineExceeded

DEFAULT_S = 120.0
CAP_S = 3600.0
# Kept back on every hop, so that the caller hears the callee's own answer instead of cutting it off.
_MARGIN_SHARE = 0.02
_MARGIN_MAX_S = 0.05

_expires_at: ContextVar[float | None] = ContextVar("deadline_expires_at", default=None)


class HasTimeRemaining(Protocol):
    """The part of a gRPC servicer context that is needed here."""

    def time_remaining(self) -> float | None: ...


def allowed_s(requested_s: float | None, default_s: float = DEFAULT_S) -> float:
    """Seconds a call may take: the caller's wish, `default_s` without one, never above the cap."""
    return min(CAP_S, default_s if requested_s is None else requested_s)


def enter(seconds: float) -> None:
    """Starts a deadline for the current task and the tasks it creates; an earlier one stays if it ends sooner."""
    expires_at = time.monotonic() + seconds
    current = _expires_at.get()
    _expires_at.set(expires_at if current is None else min(current, expires_at))


def remaining_s(context: HasTimeRemaining | None = None) -> float:
    """Seconds left for the current call, 0 when it is over; the default where no deadline was set."""
    expires_at = _expires_at.get()
    left = DEFAULT_S if expires_at is None else expires_at - time.monotonic()
    if context is not None:
        left = min(left, allowed_s(context.time_remaining()))
    return max(0.0, left)


def shrunk_s(wish_s: float | None = None) -> float:
    """Seconds to give to an outgoing call: what is left, less a small margin, and no more than `wish_s`.

    Raises:
        DeadlineExceeded: nothing is left, so the call would be made in vain.
    """
    left = remaining_s()
    if left <= 0.0:
        raise DeadlineExceeded("no time left for another call")
    left -= min(_MARGIN_MAX_S, left * _MARGIN_SHARE)
    return left if wish_s is None else min(left, wish_s)
