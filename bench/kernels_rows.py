"""Rows of one kernel: what a check of it found, and its time beside its bar and its floor. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.kernels_timing import median_us
from bench.table import Row


def checked(name: str, check: Callable[[], object]) -> Row:
    """What `check` found: it raises AssertionError where something is wrong."""
    try:
        check()
    except AssertionError as wrong:
        return Row(f"{name}: {wrong}", 1, "wrong", 0)
    return Row(name, 0, "wrong", 0)


def timed(
    name: str, work: Callable[[], object], floor_us: float, bar_us: float | None, floor_of: str = "floor"
) -> Iterator[Row]:
    """Median microseconds of `work`, and which share of it the floor is."""
    time_us = median_us(work)
    yield Row(name, time_us, "us", bar_us)
    yield Row(f"  of {floor_of}", 100 * floor_us / time_us, f"% ({floor_us:.1f} us)")
