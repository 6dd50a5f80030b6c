"""The errors that services raise and callers receive. Knows the one table from error to gRPC status and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import grpc

from fabric import wire
from fabric.wire import ErrorDetail

# Binary metadata keys must end in "-bin".
DETAIL_KEY = "deepinfer-error-bin"


class ServiceError(Exception):
    """A failure that a caller may see.

    Args:
        message: what went wrong, without prompts or secrets: it is logged and sent to the caller.
        field: name of the request field or setting at fault, if one is.
        fix: what the caller can do about it.
        retryable: whether the same call may succeed later or elsewhere; None takes the class's answer.
        retry_after_s: seconds to wait before a retry, where known.
    """

    code: ClassVar[str] = "internal"
    retries: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        fix: str = "",
        retryable: bool | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.fix = fix
        self.retryable = self.retries if retryable is None else retryable
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return f"{where}{self.message}" + (f" ({self.fix})" if self.fix else "")


class InvalidArgument(ServiceError):
    """The request itself is wrong; the same request fails again anywhere."""

    code = "invalid_argument"


class NotFound(ServiceError):
    """What the request names does not exist, or not for this caller."""

    code = "not_found"


class Exhausted(ServiceError):
    """A bound is reached (queue, blocks, landing memory, quota); try later."""

    code, retries = "exhausted", True


class Unavailable(ServiceError):
    """The peer cannot be reached or is going away; another one may answer."""

    code, retries = "unavailable", True


class StaleTicket(ServiceError):
    """An epoch, ticket or address was overtaken by a newer one."""

    code = "stale_ticket"


class DataLoss(ServiceError):
    """Bytes are not what their digest says; they were not used."""

    code, retries = "data_loss", True


class DeadlineExceeded(ServiceError):
    """The time allowed for the work is over."""

    code = "deadline_exceeded"


class Unauthenticated(ServiceError):
    """No valid credential came with the call."""

    code = "unauthenticated"


class PermissionDenied(ServiceError):
    """The credential is valid but not for this."""

    code = "permission_denied"


class Cancelled(ServiceError):
    """The caller gave up."""

    code = "cancelled"


class Internal(ServiceError):
    """A defect on this side; the message tells the caller nothing about it."""

    code = "internal"


class StartError(ServiceError):
    """A process cannot start; never crosses the network."""

    code = "start_error"


STATUS: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    StaleTicket: grpc.StatusCode.FAILED_PRECONDITION,
    DataLoss: grpc.StatusCode.DATA_LOSS,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Internal: grpc.StatusCode.INTERNAL,
}

_BY_CODE = {kind.code: kind for kind in STATUS}
# What the library itself answers with; everything else it may say is a defect of ours.
_BY_STATUS = {status: kind for kind, status in STATUS.items()} | {
    grpc.StatusCode.UNIMPLEMENTED: NotFound,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgument,
}


def status_of(error: ServiceError) -> grpc.StatusCode:
    """gRPC status of an error; subclasses outside the table take their nearest base's status."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), grpc.StatusCode.INTERNAL)


def to_detail(error: ServiceError, request_id: str = "") -> ErrorDetail:
    """What travels beside the status: serialise with `wire.dump_error`."""
    return ErrorDetail(
        code=error.code,
        message=error.message,
        field=error.field,
        fix=error.fix,
        retryable=error.retryable,
        retry_after_s=error.retry_after_s,
        request_id=request_id,
    )


def from_detail(detail: ErrorDetail) -> ServiceError:
    """The error that a peer described; an unknown code becomes Internal."""
    return _BY_CODE.get(detail.code, Internal)(
        detail.message,
        field=detail.field,
        fix=detail.fix,
        retryable=detail.retryable,
        retry_after_s=detail.retry_after_s,
    )


def from_rpc(error: grpc.aio.AioRpcError) -> ServiceError:
    """The domain error behind a failed call: the peer's own where it sent one, else from the status."""
    packed = _detail_bytes(error.trailing_metadata() or ())
    if packed is not None:
        detail = wire.load_error(packed)
        if detail is not None:
            return from_detail(detail)
    return _BY_STATUS.get(error.code(), Internal)(error.details() or error.code().name)


def is_told(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether the peer's handler ended a failed call itself: transports and libraries send no detail."""
    return _detail_bytes(metadata or ()) is not None


def _detail_bytes(metadata: Iterable[tuple[str, str | bytes]]) -> bytes | None:
    return next((value for key, value in metadata if key == DETAIL_KEY and isinstance(value, bytes)), None)
