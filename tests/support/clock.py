"""Time that tests move by hand."""

from __future__ import annotations


class FakeClock:
    """A monotonic clock: call it for the time in seconds, `advance` to let time pass."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self.now += seconds
