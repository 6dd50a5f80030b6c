"""Memory and CPU of running processes. Knows process numbers, not what they do."""

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """memory_bytes: resident. cpu_percent: of one core, since the look before."""

    memory_bytes: int
    cpu_percent: float


class UsageMeter:
    """Looks at processes again and again; CPU is measured between two looks at the same process."""

    def __init__(self) -> None:
        self._known: dict[int, psutil.Process] = {}

    def look(self, pids: set[int]) -> dict[int, Usage]:
        """Usage of each process that is still there."""
        for pid in self._known.keys() - pids:
            del self._known[pid]
        return {pid: usage for pid in pids if (usage := self._one(pid)) is not None}

    def _one(self, pid: int) -> Usage | None:
        try:
            process = self._known.get(pid)
            if process is None:
                process = self._known[pid] = psutil.Process(pid)
            with process.oneshot():
                return Usage(process.memory_info().rss, process.cpu_percent())
        except psutil.NoSuchProcess:
            self._known.pop(pid, None)
            return None
