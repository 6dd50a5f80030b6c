"""What a whole local stack costs: time until it serves, memory, CPU while idle. Knows `deepinfer up` from outside.

`python -m bench.footprint [--json PATH] [--idle-s 30]`. The first of two starts
fills caches (compiled kernels, files); the second is the one that counts.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.arguments import Parser, new_file
from bench.table import Row, report


@contextmanager
def stack(folder: Path) -> Iterator[tuple[float, list[psutil.Process]]]:
    """A running stack: seconds until everything served, and all its processes, `up` itself included.

    Raises RuntimeError when the stack ends before it serves.
    """
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "cli", "up", "--http-port", "0", "--ready-file", str(ready)]
    began = time.monotonic()
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if up.stdout is None or not any(line.startswith("ready:") for line in up.stdout):
            raise RuntimeError("the stack did not come up; its own message is above")
        took_s = time.monotonic() - began
        pids = json.loads(ready.read_text())["pids"].values()
        yield took_s, [psutil.Process(pid) for pid in (up.pid, *pids)]
    finally:
        up.terminate()
        up.communicate(timeout=120)


def cpu_s(processes: list[psutil.Process]) -> float:
    """CPU seconds, user and system, that the processes have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def idle_percent(processes: list[psutil.Process], idle_s: float) -> dict[str, float]:
    """Percent of one core that each process used over `idle_s` seconds, by its command's last word."""
    before = {process.pid: cpu_s([process]) for process in processes}
    began = time.monotonic()
    time.sleep(idle_s)
    took_s = time.monotonic() - began
    return {name_of(p): 100 * (cpu_s([p]) - before[p.pid]) / took_s for p in processes}


def name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    return next((word.removeprefix("services.") for word in words if word.startswith("services.")), process.name()) + (
        f" {process.pid}"
    )


def main(arguments: list[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="write the table as JSON, too")
    parser.add_argument("--idle-s", type=float, default=30.0, help="seconds to watch the idle stack")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with stack(folder) as (first_s, _):
            pass
        with stack(folder) as (second_s, processes):
            time.sleep(5.0)  # registrations and first statuses are not idling
            idle = idle_percent(processes, options.idle_s)
            memory = {name_of(process): process.memory_info().rss / 1e6 for process in processes}
    rows = [
        Row("first start, until everything serves", first_s, "s"),
        Row("second start", second_s, "s", bar=20.0),
        Row("memory of all processes", sum(memory.values()), "MB", bar=4000.0),
        *(Row(f"  {name}", memory[name], "MB") for name in sorted(memory, key=lambda name: -memory[name])),
        Row(f"CPU over {options.idle_s:.0f} idle s, % of one core", sum(idle.values()), "%", bar=5.0),
        *(Row(f"  {name}", idle[name], "%") for name in sorted(idle, key=lambda name: -idle[name])),
    ]
    return report("A local stack", rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
