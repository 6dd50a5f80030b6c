"""Where there is no terminal, every change of state is one line, said once."""

import io
from dataclasses import replace

from rich.console import Console

from cli.member import State
from cli.screen import Screen
from cli.supervisor import Row
from cli.task import Endpoints, Task


async def unprobed() -> Endpoints | None:
    return None


PREFILL = Task("prefill-0", "prefill", ("prefill",), lambda: None, unprobed)
ROW = Row(PREFILL, State.WAITING, 0.0, None, 0, "", Endpoints())


async def test_each_change_is_said_once_with_how_long_the_state_before_lasted():
    console, now = Console(file=io.StringIO(), width=200), 0.0
    async with Screen(console, "nano", clock=lambda: now) as screen:
        starting = replace(ROW, state=State.STARTING, since=1.0, pid=7)
        for row in (ROW, starting, starting):
            screen.show([row])
        now = 20.0
        screen.show([starting])
        screen.show([starting])
        screen.show([replace(starting, state=State.SERVING, since=21.0, endpoints=Endpoints(address="127.0.0.1:9"))])
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "prefill-0  starting"
    assert "compiles" in lines[1]
    assert lines[2:] == ["prefill-0  serving after 20.0 s, pid 7, 127.0.0.1:9"]
