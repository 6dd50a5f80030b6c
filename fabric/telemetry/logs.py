"""Structured logs on stderr: one JSON object a line. Knows contextvars such as the request id, never a payload."""

from __future__ import annotations

import logging
import sys
import traceback

import structlog

# Of the whole process: a task started by gRPC inherits no context of ours.
_process: dict[str, str] = {}


def configure(service: str, instance: str, level: str = "info") -> None:
    """Sets up structlog for this process; every line carries the service and its instance."""
    _process["service"] = service
    identify(instance)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _add_process,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def identify(instance: str) -> None:
    """Names the instance once it is known: a service mints its name while it is built."""
    _process["instance"] = instance


def _add_process(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {**event, **_process}


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines name the part of the system they come from."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger


def frames(error: BaseException, limit: int = 12) -> list[str]:
    """Where an error came from, innermost last. Not its message: that may quote a user's text."""
    stack = traceback.extract_tb(error.__traceback__)[-limit:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in stack]
