"""Parsing options: what Render knows about a prompt that Parse must know too. Opaque bytes to everyone between them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from fabric.errors import InvalidArgument

_VERSION = 1
_MAX_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class ParsingOptions:
    """How the output that follows a prompt is to be read.

    `stage` says where it starts: "" (no thinking), "reasoning_start", "reasoning_continuation" or
    "content_continuation".
    """

    stage: str = ""
    tools: bool = False
    starts_in_tools: bool = False
    json_output: bool = False

    @property
    def thinking(self) -> bool:
        return bool(self.stage)


def dump(options: ParsingOptions) -> bytes:
    """Bytes that any recipe process of the same version reads."""
    return json.dumps({"version": _VERSION, **asdict(options)}, separators=(",", ":")).encode()


def load(packed: bytes) -> ParsingOptions:
    """The options behind `packed`; empty bytes mean plain text.

    Raises:
        InvalidArgument: `packed` did not come from `dump` of this version.
    """
    if not packed:
        return ParsingOptions()
    try:
        tree = json.loads(packed) if len(packed) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        tree = None
    names = {field.name for field in fields(ParsingOptions)}
    if not isinstance(tree, dict) or tree.pop("version", None) != _VERSION or set(tree) != names:
        raise _foreign()
    options = ParsingOptions(**tree)
    if not _well_typed(options):
        raise _foreign()
    return options


def _well_typed(options: ParsingOptions) -> bool:
    flags = (options.tools, options.starts_in_tools, options.json_output)
    return isinstance(options.stage, str) and all(isinstance(flag, bool) for flag in flags)


def _foreign() -> InvalidArgument:
    return InvalidArgument(
        "not parsing options of this version",
        field="parsing_options",
        fix="pass on the bytes that Render returned, unchanged, to a recipe service of the same release",
    )
