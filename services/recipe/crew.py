"""A bounded crew of threads for work that would block the event loop. Knows no request and no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fabric.errors import DeadlineExceeded, Exhausted

ResultT = TypeVar("ResultT")


class Crew:
    """`threads` threads and at most `max_waiting` jobs besides those running."""

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="recipe")
        self._capacity = threads + max_waiting
        self.pending = 0
        self.done = 0

    async def run(self, job: Callable[[], ResultT], timeout_s: float) -> ResultT:
        """The job's result. A job that overruns keeps its thread until it ends, so the bound holds.

        Raises:
            Exhausted: too many jobs wait.
            DeadlineExceeded: no result after `timeout_s` seconds.
        """
        if self.pending >= self._capacity:
            raise Exhausted(f"{self.pending} prompts wait already", fix="retry later", retry_after_s=0.2)
        self.pending += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, job)
        future.add_done_callback(self._finished)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except TimeoutError as error:
            future.cancel()  # spares the job if no thread has taken it yet
            raise DeadlineExceeded(f"the prompt was not rendered within {timeout_s:.3g} s") from error
        except asyncio.CancelledError:
            future.cancel()
            raise

    def close(self) -> None:
        """Drops waiting jobs; running ones end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _finished(self, future: asyncio.Future[ResultT]) -> None:
        self.pending -= 1
        self.done += 1
        if not future.cancelled():
            future.exception()  # an abandoned job's failure is nobody's business
