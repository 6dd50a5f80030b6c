"""Threads: how many compute a step of few rows. Knows rows, seconds and counts; computes nothing.

A step of few rows is a hundred short parallel regions. Each ends when its last thread does, and a thread whose core is
given to somebody else for a moment, such as the event loop of the same worker, ends milliseconds late: then one thread
is faster than several. Where it is not, it is slower by as much as there are cores. So both are tried, and the faster
one is used until the other one, tried again now and then, turns out to be.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

ResultT = TypeVar("ResultT")
FEW_ROWS = 64  # of one step; more rows are worth all threads
_TRIALS = 2  # of either count before one is preferred
_KEPT = 5  # newest times of either count, of which the median counts
_TRY_AGAIN = 64  # steps of a size after which the slower count is tried again


@dataclass(slots=True)
class _Size:
    """Steps of about so many rows: seconds per row, the newest ones, by count of threads."""

    times: dict[int, deque[float]] = field(default_factory=dict)
    steps: int = 0


class ThreadChoice:
    """One thread or all of them."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def of(self, rows: int, most: int) -> int:
        """Threads for a step of so many rows, where there are `most`."""
        if rows > FEW_ROWS or most == 1:
            return most
        size = self._sizes.get(rows.bit_length(), _Size())
        tried = {count: size.times.get(count, ()) for count in (1, most)}
        untried = min(tried, key=lambda count: len(tried[count]))
        if len(tried[untried]) < _TRIALS:
            return untried
        faster = min(tried, key=lambda count: statistics.median(tried[count]))
        return faster if (size.steps + 1) % _TRY_AGAIN else 1 + most - faster

    def took(self, rows: int, threads: int, seconds: float) -> None:
        """A step of so many rows by so many threads took so long."""
        if 0 < rows <= FEW_ROWS:
            size = self._sizes.setdefault(rows.bit_length(), _Size())
            size.times.setdefault(threads, deque(maxlen=_KEPT)).append(seconds / rows)
            size.steps += 1


def run(choice: ThreadChoice, rows: int, clock: Callable[[], float], work: Callable[[], ResultT]) -> ResultT:
    """A step of so many rows, by as many of this thread's compute threads as it is done fastest with."""
    most = torch.get_num_threads()
    threads, started = choice.of(rows, most), clock()
    torch.set_num_threads(threads)
    try:
        result = work()
    finally:
        torch.set_num_threads(most)
    choice.took(rows, threads, clock() - started)
    return result


def use(device: torch.device) -> None:
    """Make `device` the calling thread's, if it is a GPU with a number: kernels go to the current one of the thread
    that launches them."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
