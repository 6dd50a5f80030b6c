"""Arguments of bench commands, judged before anything is measured: what is wrong is one line on stderr and exit code 2.

Knows files, folders, programs, counts and sizes; no benchmark.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import EngineError, InvalidParameter
from engine.families.check import check_folder
from engine.sizes import bytes_of


class Parser(argparse.ArgumentParser):
    """Is called as the command was, and says what is wrong in one line."""

    def __init__(self, **options: Any) -> None:
        """As argparse's, its description as it is written, and no option by its first letters alone."""
        started = getattr(sys.modules["__main__"], "__spec__", None)
        name = f"python -m {started.name.removesuffix('.__main__')}" if started is not None else None
        written = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{"prog": name, **written, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def existing_folder(text: str) -> Path:
    """A folder that is there."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path


def model_folder(text: str) -> Path:
    """The folder of a checkpoint, whole as far as its headers tell."""
    path = existing_folder(text)
    try:
        check_folder(path)
    except EngineError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def existing_file(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return path


def new_file(text: str) -> Path:
    """A file that can be written once there is something to write."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder that is there")
    return path


def program(text: str) -> str:
    """A program, by name or path."""
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"no program {text}")
    return found


def positive(text: str) -> int:
    """A whole number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def byte_size(text: str) -> int:
    """Bytes, such as 64MiB."""
    try:
        return bytes_of(text, "size")
    except InvalidParameter as error:
        raise argparse.ArgumentTypeError(f"{error.message}: {error.fix}") from error
