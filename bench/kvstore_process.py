"""A real kvstore process for benches: started as its command starts it, ended by its number. Knows no records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_LOG_CHARS = 4000
_START_S, _LOOK_S, _STOP_S = 60.0, 0.02, 30.0


@contextmanager
def kvstore(*options: str) -> Iterator[str]:
    """The gRPC address of a kvstore with these command line options, alone and known to nobody else.

    Raises:
        RuntimeError: it did not come up. Its log's end is printed then, and when the block fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready, log = Path(folder) / "ready.json", Path(folder) / "log"
        command = [sys.executable, "-m", "services.kvstore", "--discovery", "memory://bench", "--index", "memory://"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--ready-file", str(ready), *options],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            yield _address(process, ready, log, options)
        except BaseException:
            print(f"the end of the kvstore's log:\n{log.read_text()[-_LOG_CHARS:]}", file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], ready: Path, log: Path, options: Sequence[str]) -> str:
    ends = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < ends:
        if ready.exists():
            return str(json.loads(ready.read_text())["address"])
        time.sleep(_LOOK_S)
    raise RuntimeError(f"a kvstore with {' '.join(options)} did not come up")
