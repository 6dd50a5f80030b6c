"""Calls to other services for one request: its id, its deadline, its errors as ours. Knows no message."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, Protocol, TypeVar

import grpc

from fabric import deadline, errors
from fabric.errors import Unavailable
from fabric.interceptors import REQUEST_ID_KEY

OutT = TypeVar("OutT", contravariant=True)
InT = TypeVar("InT", covariant=True)

_PLACEHOLDER = "Internal error from Core"
_STATUS_PAUSES_S = (0.0, 0.0, 0.001, 0.005, 0.02, 0.05)


class Stream(Protocol[OutT, InT]):
    """One streaming call. `receive` gives None at its end; every failure is a ServiceError."""

    @property
    def told(self) -> bool:
        """Whether the peer's own handler ended the call, well or with an error: nothing of it runs there any more."""
        ...

    async def send(self, message: OutT) -> None: ...

    async def receive(self) -> InT | None: ...

    def cancel(self) -> None:
        """Ends the call from this side; safe to repeat."""


class GrpcStream(Generic[OutT, InT]):
    """A stream over gRPC, its deadline the current one, shrunk."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._told = False

    @property
    def told(self) -> bool:
        return self._told

    async def send(self, message: OutT) -> None:
        try:
            await self._call.write(message)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError) as error:
            raise await self._ended() from error
        except asyncio.CancelledError as error:
            _refuse_foreign_cancel(error)
            raise

    async def receive(self) -> InT | None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._told = errors.is_told(error.trailing_metadata())
            raise errors.from_rpc(error) from error
        except asyncio.CancelledError as error:
            if _is_foreign():
                self._told = errors.is_told(await self._call.trailing_metadata())
            _refuse_foreign_cancel(error)
            raise
        self._told = message is grpc.aio.EOF
        return None if self._told else message

    def cancel(self) -> None:
        self._call.cancel()

    async def _ended(self) -> errors.ServiceError:
        """Why the peer ended the call. A failed write leaves a placeholder until the peer's own status is read."""
        for pause_s in _STATUS_PAUSES_S:
            await asyncio.sleep(pause_s)
            code, details = await self._call.code(), await self._call.details()
            if details != _PLACEHOLDER:
                break
        if code is grpc.StatusCode.OK or details == _PLACEHOLDER:
            return Unavailable("the peer ended the call early", fix="retry")
        trailing = await self._call.trailing_metadata()
        self._told = errors.is_told(trailing)
        return errors.from_rpc(grpc.aio.AioRpcError(code, await self._call.initial_metadata(), trailing, details))


def duplex(method: Any, request_id: str) -> GrpcStream[Any, Any]:
    """Opens a call whose both sides stream."""
    return GrpcStream(method(timeout=deadline.shrunk_s(), metadata=metadata(request_id)))


async def unary(method: Any, request: Any, request_id: str, timeout_s: float | None = None) -> Any:
    """One message for one message.

    Raises:
        ServiceError: what the peer raised, or what the transport met.
    """
    try:
        return await method(request, timeout=deadline.shrunk_s(timeout_s), metadata=metadata(request_id))
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc(error) from error
    except asyncio.CancelledError as error:
        _refuse_foreign_cancel(error)
        raise


def metadata(request_id: str) -> tuple[tuple[str, str], ...]:
    """What accompanies every call of a request."""
    return ((REQUEST_ID_KEY, request_id),) if request_id else ()


def _refuse_foreign_cancel(error: asyncio.CancelledError) -> None:
    """The library reports a peer's CANCELLED as our own cancellation; nobody here asked for one."""
    if _is_foreign():
        raise Unavailable("the peer cancelled the call", fix="retry") from error


def _is_foreign() -> bool:
    task = asyncio.current_task()
    return task is not None and not task.cancelling()
