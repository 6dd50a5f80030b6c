"""How far an evaluation is: bars on a terminal, a line for every tenth of a class elsewhere. Knows no problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LINES = 10


class Course:
    """Progress through `classes` classes of `n` problems each. `clock` in seconds."""

    def __init__(self, progress: Progress, classes: int, n: int, clock: Callable[[], float]) -> None:
        self._progress, self._n, self._clock = progress, n, clock
        self._all = progress.add_task("all", total=n * classes)

    @contextmanager
    def of(self, kind: str) -> Iterator[Callable[[int], None]]:
        """One class: call what it yields after each problem, with the number of right answers so far."""
        bar = self._progress.add_task(kind, total=self._n)
        began, done = self._clock(), 0

        def advance(right: int) -> None:
            nonlocal done
            done += 1
            self._progress.advance(bar)
            self._progress.advance(self._all)
            if self._progress.disable and done * _LINES // self._n > (done - 1) * _LINES // self._n:
                self._print(kind, done, right, self._clock() - began)

        try:
            yield advance
        finally:
            self._progress.remove_task(bar)

    def _print(self, kind: str, done: int, right: int, took_s: float) -> None:
        left_s = took_s / done * (self._n - done)
        text = f"{kind}: {done} of {self._n} asked, {right} right, {took_s:.0f} s, about {left_s:.0f} s left"
        self._progress.console.print(text, markup=False)


def bars(console: Console) -> Progress:
    """The bars, which stay away where no terminal would move them."""
    text = TextColumn("{task.description:<12}")
    moving = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(*moving, console=console, disable=not console.is_terminal)
