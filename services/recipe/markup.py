"""Tool calls in the markup of V3, R1, V3.1 and V3.2-Exp: control tokens around a name and JSON. Knows no token ids.

V3 and R1 write `function`, a separator, then the name and a fenced block of JSON; later models write the name, a
separator and the JSON. What fits neither is text.
"""

from __future__ import annotations

import json
import re
from enum import Enum

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_FENCED = re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


class CallMark(Enum):
    """The control tokens of the markup, by their spelling."""

    CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
    CALL_BEGIN = "<｜tool▁call▁begin｜>"
    SEPARATOR = "<｜tool▁sep｜>"
    CALL_END = "<｜tool▁call▁end｜>"
    CALLS_END = "<｜tool▁calls▁end｜>"


class CallBlock:
    """One block of calls while it arrives. `open` until its end mark."""

    def __init__(self) -> None:
        self.open = True
        self._raw = [CallMark.CALLS_BEGIN.value]  # everything not told yet, as spelled
        self._parts: list[list[str]] | None = None
        self._called = False
        self._before = 0  # pieces of `_raw` before the call that arrives

    def text(self, piece: str) -> None:
        """The next text between marks."""
        self._raw.append(piece)
        if self._parts is not None:
            self._parts[-1].append(piece)

    def mark(self, mark: CallMark) -> tuple[str, str] | None:
        """The next mark. Name and arguments (JSON) of the call that it completes, if it completes one."""
        if mark is CallMark.CALL_BEGIN:
            self._parts, self._before = [[]], len(self._raw)
        elif mark is CallMark.SEPARATOR and self._parts is not None:
            self._parts.append([])
        elif mark is CallMark.CALLS_END:
            self.open = False
        self._raw.append(mark.value)
        return self._end() if mark is CallMark.CALL_END else None

    def rest(self) -> str:
        """What of the block was no call, as spelled: nothing but white space and marks around calls is nothing."""
        rest = "".join(self._raw)
        bare = rest.removesuffix(CallMark.CALLS_END.value) if self._called else rest
        return "" if not bare.strip() else rest

    def _end(self) -> tuple[str, str] | None:
        parts, self._parts = self._parts, None
        call = read_call(*("".join(part) for part in parts)) if parts and len(parts) == 2 else None
        if call is not None and self._fits():
            self._called, self._raw = True, []
            return call
        return None

    def _fits(self) -> bool:
        """Whether all before this call was told: what cannot be read keeps the rest of its block from being calls."""
        before = self._raw[: self._before] if self._called else self._raw[1 : self._before]
        return not "".join(before).strip()


def read_call(head: str, body: str) -> tuple[str, str] | None:
    """Name and arguments from the texts before and after the separator, or None if they are no call."""
    fenced = _FENCED.fullmatch(body) if head.strip() == "function" else None
    name, arguments = fenced.groups() if fenced else (head.strip(), body.strip())
    return (name, arguments) if _NAME.fullmatch(name) and _is_object(arguments) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
