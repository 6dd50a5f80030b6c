"""One task for the engine in a process of its own, as this one loads no torch. Knows JSON and errors, no models."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fabric.errors import InvalidArgument, StartError

ROOT = Path(__file__).resolve().parent.parent
_ERROR_LINES = 5
_NEEDED = ("torch", "safetensors")


def call_engine(module: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """What `python -m module arguments` prints as JSON.

    Raises:
        InvalidArgument: the engine refuses the input; names file and field.
        StartError: torch is not installed, or the process broke or took longer than `timeout_s`.
    """
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise StartError(f"this needs {name}", field=name, fix="pip install 'deepinfer-serve[engine]'")
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=_environment())
    except subprocess.TimeoutExpired as error:
        fix = "try again on an idle machine"
        raise StartError(f"{module} took longer than {timeout_s:.0f} s", field=module, fix=fix) from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        last = "\n".join(done.stderr.splitlines()[-_ERROR_LINES:])
        raise StartError(f"{module} broke: {last}", field=module, fix="report this with the command line") from error
    if refused := answer.get("error"):
        raise InvalidArgument(refused["message"], field=refused["field"], fix=refused["fix"])
    return answer


def _environment() -> dict[str, str]:
    """Ours, with this project's packages in front: the command runs from any folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
