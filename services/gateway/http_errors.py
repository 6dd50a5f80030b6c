"""Errors as OpenAI's clients expect them. Knows one table from our errors to HTTP statuses."""

from __future__ import annotations

import json
import math

from fabric import errors
from fabric.errors import ServiceError

# Our error: (HTTP status, OpenAI's type).
_TABLE: dict[type[ServiceError], tuple[int, str]] = {
    errors.InvalidArgument: (400, "invalid_request_error"),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.PermissionDenied: (403, "permission_error"),
    errors.NotFound: (404, "invalid_request_error"),
    errors.Exhausted: (429, "rate_limit_error"),
    errors.Cancelled: (499, "cancelled"),
    errors.Internal: (500, "server_error"),
    errors.DataLoss: (500, "server_error"),
    errors.StaleTicket: (503, "server_error"),
    errors.Unavailable: (503, "server_error"),
    errors.DeadlineExceeded: (504, "timeout_error"),
}
_DEFAULT = (500, "server_error")


class BodyTooLarge(errors.InvalidArgument):
    """The HTTP body is larger than is read."""


def status_of(error: ServiceError) -> int:
    """HTTP status of an error."""
    return 413 if isinstance(error, BodyTooLarge) else _row(error)[0]


def headers_of(error: ServiceError) -> dict[str, str]:
    """Retry-After, in whole seconds, where a retry may help."""
    if not error.retryable and error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s or 1.0)))}


def body_of(error: ServiceError) -> bytes:
    """`{"error": {...}}`: `param` names the field, and so does the message, which clients show alone, with the fix."""
    where = f"{error.field}: " if error.field and error.field not in error.message else ""
    return json.dumps(
        {
            "error": {
                "message": where + error.message + (f" ({error.fix})" if error.fix else ""),
                "type": _row(error)[1],
                "param": error.field or None,
                "code": "model_not_found" if _is_unknown_model(error) else error.code,
            }
        },
        ensure_ascii=False,
    ).encode()


def _is_unknown_model(error: ServiceError) -> bool:
    return isinstance(error, errors.NotFound) and error.field == "model"


def _row(error: ServiceError) -> tuple[int, str]:
    return next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _DEFAULT)
