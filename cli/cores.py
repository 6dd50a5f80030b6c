"""Divides the cores of a machine among processes. Knows counts, no processes."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """Threads of each worker. The other services take one thread each: they wait far more than they compute."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]


def available() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def divide(cores: int, prefill: int, decode: int) -> Division:
    """Shares `cores` among the workers, one thread at least for each.

    One core is left to the other services when every worker can have two. What does not divide evenly goes to prefill
    first, which is bound by compute. Oversubscribed cores are far worse than idle ones: two spinning threads in each of
    two processes on two cores take 2.7 times as long a step as one thread each.
    """
    workers = prefill + decode
    usable = cores - 1 if cores > 2 * workers else cores
    share, rest = divmod(max(usable, workers), workers)
    threads = [share + (1 if i < rest else 0) for i in range(workers)]
    return Division(prefill=tuple(threads[:prefill]), decode=tuple(threads[prefill:]))


def environment(threads: int) -> dict[str, str]:
    """Environment that keeps every thread pool of a process to `threads`, and its idle threads off the cores."""
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {pool: str(threads) for pool in pools} | {"OMP_WAIT_POLICY": "passive"}
