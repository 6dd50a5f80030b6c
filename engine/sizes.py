"""Sizes as people write them: 80GB, 141GiB, 24G. Knows units; reads every option that is a size in bytes."""

from __future__ import annotations

import re

from engine.errors import InvalidParameter

MIB, GIB = 2**20, 2**30
_UNITS = {"": 1, **{prefix: 10 ** (3 * power) for power, prefix in enumerate("KMGT", 1)}}
_BINARY = {f"{prefix}I": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?(B?)", re.IGNORECASE)


def bytes_of(text: str, field: str, least: int = 1, bare: int = 1) -> int:
    """Bytes of `text`; a number without a unit counts `bare` bytes.

    Raises InvalidParameter, naming `field`, for what is no size, and for one below `least` bytes: often a unit was
    forgotten.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise InvalidParameter(field, f"{text!r} is not a size", "give one such as 80GB, 141GiB or 24G")
    number, prefix, ending = found[1], (found[2] or "").upper(), found[3]
    unit = (_UNITS | _BINARY)[prefix] if prefix or ending else bare
    size = int(float(number) * unit)
    if size < least:
        forgotten = bare == 1 and not (prefix or ending)
        fix = f"give {number}GB, if gigabytes are meant" if forgotten else f"give at least {_shown(least)}"
        raise InvalidParameter(field, f"{text!r} is {size:,} bytes, too little", fix)
    return size


def _shown(size: int) -> str:
    """A bound in its largest whole unit."""
    unit = next((name for name, of in reversed(_BINARY.items()) if size >= of and not size % of), "")
    return f"{size // _BINARY[unit]}{unit[0]}iB" if unit else f"{size}B"
