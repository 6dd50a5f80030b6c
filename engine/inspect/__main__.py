"""`python -m engine.inspect`: one report as JSON on standard output. An error is JSON as well, with exit code 1."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from engine.checkpoint.errors import CheckpointError
from engine.errors import EngineError, InvalidParameter
from engine.inspect.report import Question, inspect
from engine.sizes import MIB, bytes_of


def main(arguments: list[str]) -> int:
    """0: a report. 1: an error with `field`, `message` and `fix`."""
    question = _question(arguments)
    try:
        answer, code = asdict(inspect(question)), 0
    except EngineError as error:
        answer, code = {"error": _fault(error, question.path)}, 1
    json.dump(answer, sys.stdout)
    return code


def _question(arguments: list[str]) -> Question:
    parser = argparse.ArgumentParser(prog="python -m engine.inspect", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--tp", type=int, nargs="+", default=[])
    parser.add_argument("--ep", type=int, nargs="+", default=[])
    parser.add_argument("--memory", type=_size, nargs="*", default=[], help="of one rank, such as 80GB")
    parser.add_argument("--sequences", type=int, default=1)
    given = parser.parse_args(arguments)
    return Question(given.path, tuple(given.tp), tuple(given.ep), tuple(given.memory), given.sequences)


def _size(text: str) -> int:
    try:
        return bytes_of(text, "--memory", least=MIB)
    except InvalidParameter as error:
        raise argparse.ArgumentTypeError(f"{error.message}: {error.fix}") from error


def _fault(error: EngineError, path: Path) -> dict[str, str]:
    """A family knows its config as config.json; whoever asked named a file or a folder."""
    field = error.field
    if isinstance(error, CheckpointError) and error.file == "config.json":
        file = path if path.is_file() else path / "config.json"
        field = f"{file}: {error.item}" if error.item else str(file)
    return {"field": field, "message": error.message, "fix": error.fix}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
