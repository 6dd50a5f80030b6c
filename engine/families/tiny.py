"""Tiny random checkpoints by family: one writer each, plus a tokenizer, so that a stack can serve them. Reads nothing.

`python -m engine.families.tiny FAMILY DIR` prints what was written as JSON, or an error as JSON with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from engine.errors import EngineError, InvalidParameter
from engine.families import tiny_tokenizer
from engine.families.registry import packages

Writer = Callable[[Path, int, bool], object]  # folder, seed, quantized
WRITERS: dict[str, Writer] = {
    name: writer for package in packages() for name, writer in import_module(f"{package}.tiny").WRITERS.items()
}


def write(family: str, folder: Path, seed: int = 0, quantized: bool = False) -> Path:
    """Writes config.json, tokenizer.json and model.safetensors into a new or empty `folder`.

    Raises InvalidParameter naming `family`, `folder` or `quantized`; nothing is written then.
    """
    if family not in WRITERS:
        raise InvalidParameter("family", f"{family!r} is not known", f"use one of {', '.join(WRITERS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidParameter("folder", f"{folder} exists and is not an empty folder", "name a new or empty folder")
    WRITERS[family](folder, seed, quantized)
    tokenizer = tiny_tokenizer.build(_vocab_size(folder / "config.json"))
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    return folder


def _vocab_size(path: Path) -> int:
    config = json.loads(path.read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["vocab_size"])


def main(arguments: list[str]) -> int:
    """0: written. 1: an error with `field`, `message` and `fix`."""
    parser = argparse.ArgumentParser(prog="python -m engine.families.tiny", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("family")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    try:
        folder = write(given.family, given.folder, given.seed, given.quantized)
    except OSError as error:
        message, fix = f"cannot write in {given.folder}: {error.strerror}", "name a folder that is writable"
        json.dump({"error": {"field": "folder", "message": message, "fix": fix}}, sys.stdout)
        return 1
    except EngineError as error:
        json.dump({"error": {"field": error.field, "message": error.message, "fix": error.fix}}, sys.stdout)
        return 1
    size = (folder / "model.safetensors").stat().st_size
    json.dump({"folder": str(folder), "family": given.family, "bytes": size}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
