"""Restart policy: when a process that ended may start again. Knows times and counts, no processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Bounds of the backoff.

    first_delay_s: wait after the first failure; doubles with each further one, up to longest_delay_s.
    stable_after_s: a run that served this long clears the history.
    start_limit: failures in a row that a process may have before it served once. Small: the cause is a setting.
    crash_limit: the same for a process that has served before.
    """

    first_delay_s: float = 0.5
    longest_delay_s: float = 15.0
    stable_after_s: float = 30.0
    start_limit: int = 2
    crash_limit: int = 5


class Restarts:
    """Failures of one process in a row."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.failures = 0

    def delay_s(self, served_s: float | None, served_before: bool) -> float | None:
        """Seconds to wait after a run that ended, or None when the process is in a crash loop.

        served_s: how long this run served; None when it never did.
        served_before: whether this or an earlier run served.
        """
        policy = self._policy
        if served_s is not None and served_s >= policy.stable_after_s:
            self.failures = 0
        self.failures += 1
        if self.failures >= (policy.crash_limit if served_before else policy.start_limit):
            return None
        return float(min(policy.longest_delay_s, policy.first_delay_s * 2 ** (self.failures - 1)))
