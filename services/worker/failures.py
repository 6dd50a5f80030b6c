"""Engine errors as service errors. Knows both kinds and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine import errors as engine
from fabric import errors as service

_RETRY_S = 0.5


def translate(error: engine.EngineError) -> service.ServiceError:
    """The service error that tells a caller the same; what callers cannot act on becomes Internal."""
    match error:
        case engine.InvalidParameter() | engine.DuplicateRequest():
            return service.InvalidArgument(error.message, field=error.field, fix=error.fix)
        case engine.Exhausted():
            return service.Exhausted(error.message, field=error.field, fix=error.fix, retry_after_s=_RETRY_S)
        case engine.UnknownRequest():
            return service.NotFound(error.message, field=error.field, fix=error.fix)
        case engine.NotReserved():
            return service.StaleTicket(error.message, field=error.field, fix=error.fix)
        case engine.CallTimeout() | engine.EngineStopped():
            return service.Unavailable(error.message, fix=error.fix)
        case _:
            return service.Internal(error.message, field=error.field, fix=error.fix)


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raises what the engine raises inside as a service error."""
    try:
        yield
    except engine.EngineError as error:
        raise translate(error) from error
