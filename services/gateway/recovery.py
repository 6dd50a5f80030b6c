"""Recovery: whether a request whose workers failed begins anew, and when. Pure: knows errors, counts and a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from fabric.errors import Cancelled, DeadlineExceeded, Exhausted, ServiceError, StaleTicket

_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
# With less than this left a deadline was our own, not a shorter one that a worker set itself.
_OWN_S = 0.25


class RetryBudget:
    """Retries of a whole process: `share` of one per request and `floor_per_s` each second, at most `burst` at once.

    It starts full: a lost worker may take as many streams along as may run, and each of them moves once. Workers that
    keep failing soon find it empty. `clock` gives monotonic seconds.
    """

    def __init__(self, share: float, floor_per_s: float, burst: int, clock: Callable[[], float]) -> None:
        self._share, self._floor_per_s, self._burst, self._clock = share, floor_per_s, burst, clock
        self._left, self._at = float(burst), clock()

    def request(self) -> None:
        """A request arrived."""
        self._add(self._share)

    def spend(self) -> bool:
        """Takes one retry if there is one."""
        now = self._clock()
        self._add(self._floor_per_s * (now - self._at))
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _add(self, retries: float) -> None:
        self._left = min(float(self._burst), self._left + retries)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one request: how often it may begin anew, and how often wait for room where an answer is under way."""

    moves: int = 3
    waits: int = 12


def worth_it(error: ServiceError, left_s: float) -> bool:
    """Whether other workers may succeed where `error` came up, with `left_s` seconds until the request's deadline.

    A worker that stops cancels the calls that it accepted and did not begin. A client that leaves is never asked about.
    """
    if isinstance(error, DeadlineExceeded):
        return left_s > _OWN_S
    return error.retryable or isinstance(error, StaleTicket | Cancelled)


class Recovery:
    """Decides for one request. `random` draws jitter, so that the streams of a lost worker do not arrive together."""

    def __init__(self, budget: RetryBudget, bounds: Bounds, random: Random) -> None:
        self._budget, self._bounds, self._random = budget, bounds, random
        self.moves = self.waits = 0

    def pause_s(self, error: ServiceError, begun: bool, left_s: float) -> float | None:
        """Seconds to wait before it begins anew after `error`; None where it must not.

        An answer that has `begun` waits for room where workers are full; one that has not is refused soon, since its
        client can come back. Full workers refuse before any work, so waiting for them costs no budget.
        """
        if not worth_it(error, left_s):
            return None
        waits = begun and isinstance(error, Exhausted)
        done, most = (self.waits, self._bounds.waits) if waits else (self.moves, self._bounds.moves)
        if isinstance(error, Exhausted) and not begun:
            most = min(most, 1)
        pause_s = self._jittered(_PAUSE_S * 2**done, (error.retry_after_s or 0.0) if waits else 0.0)
        if done >= most or pause_s >= left_s or not (waits or self._budget.spend()):
            return None
        self.waits, self.moves = self.waits + waits, self.moves + (not waits)
        return pause_s

    def _jittered(self, pause_s: float, least_s: float) -> float:
        return min(_LONGEST_PAUSE_S, max(pause_s, least_s)) * self._random.uniform(0.5, 1.5)
