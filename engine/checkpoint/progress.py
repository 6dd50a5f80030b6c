"""How far a load is: tensors and bytes counted, and shown as a bar where someone watches. Reads nothing itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar


@dataclass(frozen=True, slots=True)
class Loaded:
    """What has been read of what is to be read."""

    tensors: int
    all_tensors: int
    bytes: int
    all_bytes: int


Progress = Callable[[Loaded], None]


class Meter:
    """Adds up one load and tells `progress` after every tensor."""

    def __init__(self, tensors: int, size: int, progress: Progress | None) -> None:
        self._all, self._size, self._progress = tensors, size, progress
        self._tensors = self._bytes = 0

    def add(self, size: int) -> None:
        """One more tensor of `size` bytes has been read."""
        self._tensors += 1
        self._bytes += size
        if self._progress:
            self._progress(Loaded(self._tensors, self._all, self._bytes, self._size))


@contextmanager
def load_bar(title: str, console: Console | None = None) -> Iterator[Progress | None]:
    """A Progress that draws a bar on standard error while the context is open; None where that is no terminal."""
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TextColumn("{task.fields[tensors]} tensors"), TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"loading {title}", total=None, tensors="")

        def show(loaded: Loaded) -> None:
            count = f"{loaded.tensors:,}/{loaded.all_tensors:,}"
            bar.update(task, completed=loaded.bytes, total=loaded.all_bytes, tensors=count)

        yield show
