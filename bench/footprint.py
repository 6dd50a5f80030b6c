"""What a whole local stack costs: time until it serves, memory, CPU while idle. Knows `deepinfer up` from outside.

    python -m bench.footprint [--idle-s 30]

The first of two starts fills caches (compiled kernels, files); the second is the one that counts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

WANTED = {"second start": "<= 20 s", "memory": "< 4 GB", "idle": "< 5 % of one core"}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--idle-s", type=float, default=30.0, help="seconds to watch the idle stack")
    idle_s = parser.parse_args().idle_s
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with stack(folder) as (first_s, _):
            pass
        with stack(folder) as (second_s, processes):
            time.sleep(5.0)  # registrations and first statuses are not idling
            by_process = idle_percent(processes, idle_s)
            memory = {name_of(p): p.memory_info().rss for p in processes}
    print(f"first start   {first_s:6.1f} s")
    print(f"second start  {second_s:6.1f} s   wanted {WANTED['second start']}")
    print(f"memory        {sum(memory.values()) / 1e9:6.2f} GB  wanted {WANTED['memory']}")
    print(f"idle          {sum(by_process.values()):6.2f} %   wanted {WANTED['idle']}, over {idle_s:.0f} s")
    for name in sorted(memory, key=lambda n: -memory[n]):
        print(f"  {name:<24} {memory[name] / 1e6:6.0f} MB  {by_process[name]:5.2f} %")
    met = second_s <= 20 and sum(memory.values()) < 4e9 and sum(by_process.values()) < 5
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
