"""Shows a stack while it runs: a live table on a terminal, one line for each change elsewhere. Changes nothing."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live

from cli.load import Load, LoadBoard
from cli.member import State
from cli.supervisor import Row
from cli.table import StatusTable, line, patience
from cli.usage import Usage, UsageMeter

_USAGE_EVERY_S = 2.0
_DRAW_EVERY_S = 1.0
_SPIN_EVERY_S = 0.1


class Screen:
    """Call `show` as often as you like: it draws when something changed or a drawing is due."""

    def __init__(self, console: Console, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._table = StatusTable(model)
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._meter = UsageMeter()
        self._board = LoadBoard()
        self._usage: dict[int, Usage] = {}
        self._measured_at = self._drawn_at = float("-inf")
        self._was_patient = False
        self._seen: dict[str, tuple[State, float]] = {}

    async def __aenter__(self) -> "Screen":
        if self._live:
            self._live.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        await self._board.close()

    def show(self, rows: list[Row]) -> None:
        """Draws what stands, or prints what changed."""
        changed = [row for row in rows if self._seen.get(row.task.name, (None, 0.0))[0] is not row.state]
        if self._live is None:
            self._print_patience(rows)
            for row in changed:
                self._print(row)
        elif changed or self._due(rows):
            self._draw(self._live, rows)
        for row in changed:
            self._seen[row.task.name] = (row.state, row.since)

    def _print(self, row: Row) -> None:
        before = self._seen.get(row.task.name, (row.state, row.since))[1]
        if row.state is not State.WAITING:
            self._console.print(line(row, row.since - before), soft_wrap=True)

    def _print_patience(self, rows: list[Row]) -> None:
        text = "" if self._was_patient else patience(rows, self._clock())
        if text:
            self._was_patient = True
            self._console.print(text, style="dim", soft_wrap=True)

    def _due(self, rows: list[Row]) -> bool:
        spinning = any(row.state in (State.STARTING, State.DRAINING) for row in rows)
        return self._clock() - self._drawn_at >= (_SPIN_EVERY_S if spinning else _DRAW_EVERY_S)

    def _draw(self, live: Live, rows: list[Row]) -> None:
        self._drawn_at = now = self._clock()
        pids = {row.pid for row in rows if row.pid}
        if now - self._measured_at >= _USAGE_EVERY_S:
            self._measured_at = now
            self._usage = self._meter.look(pids)
        usage = {pid: used for pid, used in self._usage.items() if pid in pids}
        live.update(self._table.draw(rows, usage, self._loads(rows), now), refresh=True)

    def _loads(self, rows: list[Row]) -> dict[str, Load]:
        workers = {row.endpoints.address: row.task.service for row in rows if row.task.service in ("prefill", "decode")}
        workers.pop("", None)
        self._board.follow(workers)
        said = {address: self._board.load(address) for address in workers}
        return {address: load for address, load in said.items() if load is not None}
