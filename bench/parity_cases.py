"""The families that parity is shown for: how each writes a tiny random checkpoint with upstream's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.families.mla import tiny as mla_tiny
from engine.families.v4 import tiny as v4_tiny


def _mla(family: str, folder: Path, seed: int) -> Path:
    return mla_tiny.write_tiny(folder, mla_tiny.TinySpec(family, seed))


def _v4(folder: Path, seed: int) -> Path:
    return v4_tiny.write_tiny(folder, v4_tiny.TinySpec(seed=seed))


FAMILIES: dict[str, Callable[[Path, int], Path]] = {**{name: partial(_mla, name) for name in mla_tiny.TINY}, "v4": _v4}


def write(family: str, folder: Path, seed: int) -> Path:
    """Write the tiny checkpoint of `family`, a key of FAMILIES; returns the folder."""
    return FAMILIES[family](folder, seed)
