"""One supervised process as a state machine. Knows states and times, starts and stops nothing."""

from enum import StrEnum

from cli.restarts import RestartPolicy, Restarts


class State(StrEnum):
    """Where a process stands."""

    WAITING = "waiting"  # for what it needs to serve first
    STARTING = "starting"
    SERVING = "serving"
    BACKOFF = "backoff"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"  # for good: it crashed again and again, or never came up


class Member:
    """State of one process. Every change names its time, in seconds of one clock.

    start_timeout_s: a run that does not serve by then counts as failed.
    """

    def __init__(self, name: str, policy: RestartPolicy, start_timeout_s: float) -> None:
        self.name = name
        self.state = State.WAITING
        self.since = 0.0
        self.runs = 0
        self.reason = ""
        self._restarts = Restarts(policy)
        self._start_timeout_s = start_timeout_s
        self._retry_at = 0.0
        self._served_before = False

    @property
    def restarts(self) -> int:
        return max(0, self.runs - 1)

    @property
    def alive(self) -> bool:
        """Whether there should be a process."""
        return self.state in (State.STARTING, State.SERVING, State.DRAINING)

    def due(self, now: float) -> bool:
        """Whether it may be started, as far as its own history goes."""
        return self.state is State.WAITING or (self.state is State.BACKOFF and now >= self._retry_at)

    def overdue(self, now: float) -> bool:
        """Whether it has been starting for too long."""
        return self.state is State.STARTING and now - self.since >= self._start_timeout_s

    def started(self, now: float) -> None:
        self.runs += 1
        self._enter(State.STARTING, now)

    def served(self, now: float) -> None:
        self._served_before = True
        self.reason = ""
        self._enter(State.SERVING, now)

    def drained(self, now: float) -> None:
        """It was told to stop. What had failed stays failed, so that the end of a stack still tells why."""
        if self.state is not State.FAILED:
            self._enter(State.DRAINING, now)

    def ended(self, now: float, reason: str, hopeless: bool = False) -> None:
        """Its process is gone: stopped as asked, or to be restarted after a backoff, or failed for good, as it has
        where it is hopeless."""
        if self.state is State.DRAINING:
            self._enter(State.STOPPED, now)
            return
        self.reason = reason
        served_s = now - self.since if self.state is State.SERVING else None
        delay_s = self._restarts.delay_s(served_s, self._served_before)
        if delay_s is None or hopeless:
            self._enter(State.FAILED, now)
            return
        self._retry_at = now + delay_s
        self._enter(State.BACKOFF, now)

    def _enter(self, state: State, now: float) -> None:
        self.state = state
        self.since = now
