"""The status table of a stack, live on a terminal and line by line elsewhere. Knows rows, no processes."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cli.console import megabytes, seconds
from cli.load import Load
from cli.member import State
from cli.supervisor import Row
from cli.usage import Usage

_STYLES = {
    State.WAITING: "dim",
    State.STARTING: "yellow",
    State.SERVING: "green",
    State.BACKOFF: "bold yellow",
    State.DRAINING: "cyan",
    State.STOPPED: "dim",
    State.FAILED: "bold red",
}
_PATIENCE_S = 12.0
PATIENCE = (
    "A model's first start compiles its kernels: a minute or two, longer on a busy machine. Later ones take seconds."
)
LEGEND = "run, wait: requests at work, in line; kv: KV blocks in use; address: gRPC"


def patience(rows: Sequence[Row], now: float) -> str:
    """PATIENCE while a worker starts for longer than one with compiled kernels would."""
    workers = [row for row in rows if row.task.service in ("prefill", "decode") and row.state is State.STARTING]
    return PATIENCE if any(now - row.since > _PATIENCE_S for row in workers) else ""


class StatusTable:
    """Draws one table. Keeps its spinners, so that they turn from one drawing to the next."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._spinners: dict[str, Spinner] = {}

    def draw(
        self, rows: Sequence[Row], usage: Mapping[int, Usage], loads: Mapping[str, Load], now: float
    ) -> RenderableType:
        """The table and the lines below it. now: on the clock of the rows; loads: by address."""
        table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
        for heading in ("service", "state", "pid", "restarts", "memory", "cpu", "run", "wait", "kv"):
            right = heading not in ("service", "state")
            table.add_column(heading, justify="right" if right else "left", no_wrap=True)
        table.add_column("address", overflow="fold")  # the one that gives way on a narrow terminal
        for row in rows:
            table.add_row(*self._cells(row, usage.get(row.pid or 0), loads.get(row.endpoints.address), now))
        again = [
            Text(f"{row.task.name} starts again: {row.reason}", style="yellow") for row in rows if _restarting(row)
        ]
        note = Text(patience(rows, now) or LEGEND, style="dim")
        if rows and all(row.state is State.STOPPED for row in rows):
            return Group(table, Text(""), Text(f"{self._model}: all has stopped", style="dim"))
        return Group(table, Text(""), *again, self._summary(rows, usage), note)

    def _cells(self, row: Row, usage: Usage | None, load: Load | None, now: float) -> tuple[RenderableType, ...]:
        return (
            row.task.name,
            self._state(row, now),
            str(row.pid or ""),
            Text(str(row.restarts), style="yellow" if row.restarts else "dim"),
            megabytes(usage.memory_bytes) if usage else "",
            f"{usage.cpu_percent:.0f} %" if usage else "",
            str(load.running) if load else "",
            str(load.waiting) if load else "",
            f"{load.kv_used:.0%}" if load else "",
            row.endpoints.address,
        )

    def _state(self, row: Row, now: float) -> RenderableType:
        style, elapsed = _STYLES[row.state], seconds(max(0.0, now - row.since))
        if row.state in (State.STARTING, State.DRAINING):
            spinner = self._spinners.setdefault(row.task.name, Spinner("dots"))
            spinner.update(text=Text(f"{row.state} {elapsed}", style=style))
            return spinner
        if row.state is State.SERVING:
            return Text(row.state, style=style)
        return Text(f"{row.state} {row.reason}".strip(), style=style)

    def _summary(self, rows: Sequence[Row], usage: Mapping[int, Usage]) -> Text:
        memory = megabytes(sum(one.memory_bytes for one in usage.values()))
        cpu = sum(one.cpu_percent for one in usage.values())
        http = next((row.endpoints.http for row in rows if row.endpoints.http), "")
        text = Text(f"{self._model}  {memory}  {cpu:.0f} % of one core")
        if http:
            text.append(f"  http://{http}/v1", style="bold")
        text.append("  Ctrl-C stops all", style="dim")
        return text


def _restarting(row: Row) -> bool:
    return row.state is State.STARTING and bool(row.reason)


def line(row: Row, took_s: float) -> str:
    """One change of state as a plain line. took_s: how long the state before it lasted."""
    parts = [f"{row.task.name:<10} {row.state}"]
    if row.state is State.SERVING:
        parts.append(f"after {seconds(took_s)}, pid {row.pid}, {row.endpoints.http or row.endpoints.address}")
    if row.reason:
        parts.append(f"again after {row.reason}" if row.state is State.STARTING else f"({row.reason})")
    return " ".join(parts)
