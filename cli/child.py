"""One operating system process of ours. Knows how to start it so that it never outlives us, and how to end it."""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: between fork and exec nothing may be imported.
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process in a group of its own, killed by the kernel when this process dies. Its output goes to `log`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @staticmethod
    async def start(command: tuple[str, ...], environment: Mapping[str, str], log: Path) -> "Child":
        """Starts `command`; to be called from the main thread, whose end is what the kernel watches.

        Raises OSError when the program cannot be run.
        """
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **environment},
                process_group=0,
                preexec_fn=_die_with_parent,
            )
        return Child(process)

    @property
    def exit_reason(self) -> str | None:
        """How it ended, or None while it runs."""
        code = self._process.returncode
        if code is None:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def terminate(self) -> None:
        """Asks it to drain and end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and whatever it started."""
        self._signal(signal.SIGKILL)

    async def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        return self._process.returncode is not None

    def _signal(self, number: signal.Signals) -> None:
        # The group outlives its leader while it has members, so it is signalled even when the leader is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
