"""Tiny random checkpoints by family: one writer each, plus a tokenizer, so that a stack can serve them. Reads nothing.

`python -m engine.families.tiny FAMILY DIR` prints what was written as JSON, or an error as JSON with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from engine.errors import EngineError, InvalidParameter
from engine.families import tiny_tokenizer
from engine.families.mla import tiny as mla
from engine.families.v4 import tiny as v4
from engine.families.v41 import tiny as v41

_MLA_BLOCK = 16  # divides every width of the tiny models, which transformers' reader of FP8 needs

Writer = Callable[[Path, int, bool], object]


def _mla(family: str) -> Writer:
    def write(folder: Path, seed: int, quantized: bool) -> object:
        block = _MLA_BLOCK if quantized else None
        return mla.write_tiny(folder, mla.TinySpec(family, seed, fp8_block=block, exponent_scales=False))

    return write


def _v2(folder: Path, seed: int, quantized: bool) -> object:
    if quantized:
        raise InvalidParameter("quantized", "V2 was published in bf16 alone", "leave --quantized out, or take v3")
    return _mla("v2")(folder, seed, False)


def _v4(folder: Path, seed: int, quantized: bool) -> object:
    return v4.write_tiny(folder, v4.TinySpec(seed=seed, upstream=True, quantized=quantized))


def _v41(folder: Path, seed: int, quantized: bool) -> object:
    return v41.write_tiny(folder, v41.TinySpec(seed=seed, quantized=quantized))


WRITERS: dict[str, Writer] = {"v2": _v2, "v3": _mla("v3"), "v32": _mla("v32"), "v4": _v4, "v41": _v41}


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
    except EngineError as error:
        json.dump({"error": {"field": error.field, "message": error.message, "fix": error.fix}}, sys.stdout)
        return 1
    size = (folder / "model.safetensors").stat().st_size
    json.dump({"folder": str(folder), "family": given.family, "bytes": size}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
