"""Failpoints: named lines at which a test makes this process fail. Inert unless armed; knows no service."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from fabric import errors
from fabric.errors import ServiceError, StartError
from fabric.telemetry import logs

_log = logs.get("failpoints")
EXIT_CODE = 86
_SPEC = re.compile(r"([a-z_.]+)=(error|delay|exit|freeze)(?::([a-z_]+|[0-9.]+))?(?:@([1-9][0-9]*))?")
_FIX = (
    "write name=action, actions error[:code], delay:seconds, exit, freeze; @n for the n-th time alone; join by commas"
)
_ERRORS: Mapping[str, type[ServiceError]] = {
    kind.code: kind
    for kind in (errors.Unavailable, errors.DataLoss, errors.StaleTicket, errors.Exhausted, errors.Internal)
}
_declared: dict[str, Failpoint] = {}


@dataclass(frozen=True, slots=True)
class Action:
    """What happens at a point: every time it is reached, or the `nth` time alone (0: every time)."""

    kind: str
    argument: str = ""
    nth: int = 0


@dataclass(slots=True)
class Failpoint:
    """One named line. Declared once at import, reached with `await point.reached()`."""

    name: str
    action: Action | None = None
    hits: int = field(default=0, compare=False)

    async def reached(self) -> None:
        """Does nothing unless armed.

        Raises:
            ServiceError: the error that a test asked for.
        """
        if self.action is not None:
            await self._act(self.action)

    async def _act(self, action: Action) -> None:
        self.hits += 1
        if action.nth and self.hits != action.nth:
            return
        match action.kind:
            case "error":
                raise _ERRORS[action.argument or "unavailable"](f"failpoint {self.name}")
            case "delay":
                await asyncio.sleep(float(action.argument))
            case "exit":
                os._exit(EXIT_CODE)  # as a crash: nothing is cleaned up
            case _:
                os.kill(os.getpid(), signal.SIGSTOP)


def declare(name: str) -> Failpoint:
    """The point of that name; one line of one module owns it."""
    if name in _declared:
        raise ValueError(f"failpoint {name!r} is declared twice")
    _declared[name] = Failpoint(name)
    return _declared[name]


def declared() -> list[str]:
    """Names of the points of all modules that are imported."""
    return sorted(_declared)


def hits(name: str) -> int:
    """How often an armed point was reached since it was armed."""
    return _declared[name].hits


def check(spec: str) -> list[tuple[str, Action]]:
    """The points that `spec` names and what shall happen there. Arms nothing; raises as `arm`."""
    return [_parsed(part.strip()) for part in spec.split(",") if part.strip()]


def arm(spec: str) -> None:
    """Arms the points that `spec` names: `decode.token=exit@7,gateway.receipt=delay:0.5`. Empty arms nothing.

    Raises:
        StartError: an unknown point or action.
    """
    for name, action in check(spec):
        _declared[name].action, _declared[name].hits = action, 0
        _log.warning("armed: this process will misbehave", point=name, action=action.kind)


@contextmanager
def armed(spec: str) -> Iterator[None]:
    """Arms for the body, in this process."""
    arm(spec)
    try:
        yield
    finally:
        for point in _declared.values():
            point.action = None


def _parsed(part: str) -> tuple[str, Action]:
    found = _SPEC.fullmatch(part)
    if found is None:
        raise StartError(f"{part!r} is no failpoint", field="failpoints", fix=_FIX)
    name, kind, argument, nth = found[1], found[2], found[3] or "", int(found[4] or 0)
    if name not in _declared:
        raise StartError(f"no failpoint {name!r} here", field="failpoints", fix=f"use {', '.join(declared())}")
    sane = {"error": not argument or argument in _ERRORS, "delay": _is_seconds(argument)}.get(kind, not argument)
    if not sane:
        raise StartError(f"{kind} cannot take {argument!r}", field="failpoints", fix=_FIX)
    return name, Action(kind, argument, nth)


def _is_seconds(text: str) -> bool:
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None
