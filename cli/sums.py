"""A model folder against its SHA256SUMS. Knows names and bytes, nothing of what they mean."""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from cli.doctor import Finding, Health

NAME = "SHA256SUMS"
_MAKE = f"sha256sum *.json *.safetensors > {NAME}"
_LINE = re.compile(r"(?P<digest>[0-9a-f]{64}) [ *](?P<name>[^/\\]+)")
_READ_BYTES = 1 << 22

Tell = Callable[[int, int], None]
"""Told of bytes done and of bytes in all."""


def verify(folder: Path, tell: Tell) -> Finding:
    """Reads every file of the folder that SHA256SUMS names. Names the first that differs, is missing or not listed."""
    try:
        listed = _read(folder / NAME)
    except FileNotFoundError:
        return Finding(Health.WARN, f"{folder} has no {NAME} to compare with", f"in a folder known to be good: {_MAKE}")
    except ValueError as error:
        return Finding(Health.FAIL, str(error), f"restore the file, or in a folder known to be good: {_MAKE}")
    fix = "download the file again"
    if missing := sorted(name for name in listed if not (folder / name).is_file()):
        return Finding(Health.FAIL, f"{folder / missing[0]} is missing", fix)
    if strange := sorted(path.name for path in folder.glob("*.safetensors") if path.name not in listed):
        return Finding(Health.FAIL, f"{NAME} does not list {strange[0]}", f"remove the file, or {_MAKE}")
    total, done = sum((folder / name).stat().st_size for name in listed), 0
    for name, expected in listed.items():
        digest = hashlib.sha256()
        for piece in _pieces(folder / name):
            digest.update(piece)
            done += len(piece)
            tell(done, total)
        if digest.hexdigest() != expected:
            return Finding(Health.FAIL, f"{folder / name} is not what {NAME} says: its bytes have changed", fix)
    return Finding(Health.OK, f"all {len(listed)} files, {total / 1e6:,.1f} MB, are what {NAME} says")


def _read(path: Path) -> dict[str, str]:
    """Digests by file name. Raises FileNotFoundError, and ValueError naming the line that is not one."""
    listed = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{path}, line {number}: not a SHA-256 and the name of a file beside it")
        listed[match["name"]] = match["digest"]
    return listed


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            yield piece
