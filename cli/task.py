"""What is to run: one process of the stack as a value. Knows commands and order, starts nothing."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a process that serves can be reached, as host:port; empty where it has no such door."""

    address: str = ""
    http: str = ""
    metrics: str = ""


Probe = Callable[[], Awaitable[Endpoints | None]]
Alive = Callable[[Endpoints], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Task:
    """One process to run.

    name: unique, such as "decode-1"; service: what it is, such as "decode".
    needs: names of the tasks that must serve before it starts.
    reset: called before each start, so that traces of an earlier run do not count.
    probe: answers where the process serves, or None while it does not; must return within a second or so.
    drain_rank: tasks of a lower rank are stopped, and gone, before those of a higher one are told to stop.
    alive: answers within a second or so whether a process that served there still does; None: only its end counts.
    hopeless: ways to end, such as "exit code 2", after which another start would end so, too.
    """

    name: str
    service: str
    command: tuple[str, ...]
    reset: Callable[[], None]
    probe: Probe
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    drain_rank: int = 0
    alive: Alive | None = None
    hopeless: tuple[str, ...] = ()
