"""Deaths: which incarnations are proven gone, so that nothing will be written by them any more. Pure: no clock, no IO.

A proof is the word of a kernel. That a lease ended, a connection broke or a call failed is none: a process that is
frozen or cut off loses all of these and may still wake up and write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fabric.discovery.member import MemberInfo
from fabric.processes import ProcessId


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of an instance. `process` is a packed ProcessId, empty where it could not tell."""

    instance: str
    epoch: int
    process: str = ""

    def is_same(self, instance: str, epoch: int) -> bool:
        return (self.instance, self.epoch) == (instance, epoch)


class Deaths:
    """Two proofs: our own kernel says that the process is gone, or its successor holds its name on its host."""

    def __init__(self, is_gone: Callable[[ProcessId], bool]) -> None:
        self._is_gone = is_gone
        self._present: dict[str, MemberInfo] = {}

    def listed(self, members: Iterable[MemberInfo]) -> None:
        """The members that there are now."""
        self._present = {member.instance: member for member in members}

    def proven(self, incarnation: Incarnation) -> bool:
        process = ProcessId.unpack(incarnation.process)
        return process is not None and (self._is_gone(process) or self._is_succeeded(incarnation, process))

    def _is_succeeded(self, incarnation: Incarnation, process: ProcessId) -> bool:
        """A named instance holds its name on its host (`claim_name`) until its process is gone."""
        newer = self._present.get(incarnation.instance)
        if newer is None or newer.epoch <= incarnation.epoch:
            return False
        holder = ProcessId.unpack(newer.process)
        if holder is None or (holder.kernel, holder.network) != (process.kernel, process.network):
            return False
        return (holder.pids, holder.pid, holder.started) != (process.pids, process.pid, process.started)


class Vigil:
    """Waits on after a death, since what the dead had under way may still arrive.

    Time in which we stood still does not count: what came meanwhile was not taken from its socket either.
    """

    def __init__(self, linger_s: float, longest_step_s: float) -> None:
        self._linger_s, self._longest_step_s = linger_s, longest_step_s
        self._waited: dict[str, float] = {}
        self._looked_at: float | None = None

    def step(self, now: float, dead: Iterable[str]) -> list[str]:
        """Names those of `dead` that were so in every step for `linger_s` seconds; each once."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, self._longest_step_s)
        self._looked_at = now
        self._waited = {name: self._waited[name] + passed if name in self._waited else 0.0 for name in dead}
        over = [name for name, waited in self._waited.items() if waited >= self._linger_s]
        for name in over:
            del self._waited[name]
        return over
