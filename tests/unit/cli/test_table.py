"""The status table says what stands."""

import io

from rich.console import Console

from cli.load import Load
from cli.member import State
from cli.supervisor import Row
from cli.table import LEGEND, StatusTable, line, patience
from cli.task import Endpoints, Task
from cli.usage import Usage


async def unprobed() -> Endpoints | None:
    return None


def row(name: str, state: State, **changes) -> Row:
    task = Task(name, name.split("-")[0], (name,), lambda: None, unprobed)
    values = {"since": 10.0, "pid": None, "restarts": 0, "reason": "", "endpoints": Endpoints()} | changes
    return Row(task=task, state=state, **values)


def drawn(rows, usage, loads) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(StatusTable("nano").draw(rows, usage, loads, now=12.5))
    return console.file.getvalue()


def test_a_serving_worker_shows_its_process_load_and_address():
    serving = row("decode-0", State.SERVING, pid=7, endpoints=Endpoints(address="127.0.0.1:9"))
    text = drawn([serving], {7: Usage(300_000_000, 12.0)}, {"127.0.0.1:9": Load(3, 2, 0.25)})
    cells = next(line for line in text.splitlines() if line.startswith("decode-0")).split()
    assert cells == ["decode-0", "serving", "7", "0", "300", "MB", "12", "%", "3", "2", "25%", "127.0.0.1:9"]


def test_a_starting_process_shows_for_how_long_and_a_crashed_one_why():
    text = drawn([row("prefill-0", State.STARTING, pid=8), row("recipe", State.BACKOFF, reason="exit code 1")], {}, {})
    assert "starting 2.5 s" in text
    assert "backoff exit code 1" in text


def test_a_process_that_starts_again_says_why():
    again = row("gateway", State.STARTING, pid=8, restarts=1, reason="did not serve in time")
    assert "gateway starts again: did not serve in time" in drawn([again], {}, {})


def test_a_quiet_table_explains_its_columns():
    assert LEGEND in drawn([row("gateway", State.SERVING, pid=2)], {}, {})


def test_a_stopped_stack_no_longer_offers_to_stop():
    text = drawn([row("gateway", State.STOPPED)], {}, {})
    assert "all has stopped" in text
    assert "Ctrl-C" not in text and LEGEND not in text


def test_the_summary_adds_up_all_processes_and_names_the_endpoint():
    rows = [
        row("prefill-0", State.SERVING, pid=1),
        row("gateway", State.SERVING, pid=2, endpoints=Endpoints("127.0.0.1:7", "127.0.0.1:8000")),
    ]
    text = drawn(rows, {1: Usage(900_000_000, 10.0), 2: Usage(200_000_000, 5.0)}, {})
    assert "1.10 GB" in text
    assert "15 % of one core" in text
    assert "http://127.0.0.1:8000/v1" in text


def test_a_plain_line_tells_state_duration_and_reason():
    serving = row("gateway", State.SERVING, pid=2, endpoints=Endpoints("127.0.0.1:7", "127.0.0.1:8000"))
    assert line(serving, 1.5) == "gateway    serving after 1.5 s, pid 2, 127.0.0.1:8000"
    assert line(row("etcd", State.FAILED, reason="exit code 1"), 1.0) == "etcd       failed (exit code 1)"
    assert line(row("etcd", State.STARTING, reason="exit code 1"), 1.0) == "etcd       starting again after exit code 1"


def test_a_long_first_start_of_a_worker_is_explained_and_nothing_else_is():
    starting = [row("prefill-0", State.STARTING), row("recipe", State.STARTING)]
    assert patience(starting, now=20.0) == ""
    assert patience(starting, now=30.0)
    assert patience(starting[1:], now=30.0) == ""
    assert patience([row("prefill-0", State.SERVING)], now=30.0) == ""
