"""What surrounds a call on the server: request id, deadline, error mapping, metrics, access log. Knows no payload."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

import grpc
import structlog

from fabric import deadline, errors, wire
from fabric.errors import Cancelled, DeadlineExceeded, Internal, ServiceError
from fabric.telemetry import logs
from fabric.telemetry.metrics import Metrics

REQUEST_ID_KEY = "x-request-id"
_MAX_REQUEST_ID_CHARS = 128

Handler = Any  # grpc.RpcMethodHandler, whose four behaviours the library leaves untyped
Context = Any  # grpc.aio.ServicerContext[Request, Response]

_log = logs.get("rpc")
_request_id: ContextVar[str] = ContextVar("request_id", default="")


def request_id() -> str:
    """Id of the call being answered by this task, empty outside of one."""
    return _request_id.get()


class InFlight:
    """Counts the calls being answered, and those among them that end when the work does."""

    def __init__(self) -> None:
        self.finite = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, finite: bool) -> None:
        self.finite += finite
        if self.finite:
            self._idle.clear()

    def leave(self, finite: bool) -> None:
        self.finite -= finite
        if not self.finite:
            self._idle.set()

    async def idle(self) -> None:
        """Returns when no finite call is left."""
        await self._idle.wait()


class CallScope(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server; the only place where an error becomes a status.

    Streams named Watch have no end of their own: without a deadline from the caller they get the cap, not the default,
    and a drain does not wait for them.
    """

    def __init__(self, metrics: Metrics, in_flight: InFlight) -> None:
        self._metrics = metrics
        self._in_flight = in_flight
        self._wrapped: dict[str, Handler] = {}  # by method, of those there are

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        method = str(details.method)
        if method not in self._wrapped:
            handler = await continuation(details)
            if handler is None:
                return None
            wrap = self._wrap_stream if handler.response_streaming else self._wrap_unary
            self._wrapped[method] = wrap(method, handler)
        return self._wrapped[method]

    def _wrap_unary(self, method: str, handler: Handler) -> Handler:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )

        async def answer(request: Any, context: Context) -> Any:
            async with self._scope(method, context):
                return await inner(request, context)

        return make(answer, handler.request_deserializer, handler.response_serializer)

    def _wrap_stream(self, method: str, handler: Handler) -> Handler:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )

        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self._scope(method, context), aclosing(inner(request, context)) as replies:
                async for reply in replies:
                    yield reply

        async def answer_writing(request: Any, context: Context) -> None:
            async with self._scope(method, context):
                # Not with the first write: if that is cancelled, nothing can end the call any more.
                await context.send_initial_metadata(())
                await inner(request, context)

        behaviour = answer if inspect.isasyncgenfunction(inner) else answer_writing
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _scope(self, method: str, context: Context) -> AsyncIterator[None]:
        """One call from arrival to its status."""
        finite = not method.endswith(("/Watch", "/ServerReflectionInfo"))
        call_id = _adopt_request_id(context)
        seconds = deadline.allowed_s(context.time_remaining(), deadline.DEFAULT_S if finite else deadline.CAP_S)
        deadline.enter(seconds)
        started = time.monotonic()
        self._in_flight.enter(finite)
        self._metrics.inflight.labels(method).inc()
        failure: ServiceError | None = None
        try:
            async with _mapped(seconds):
                yield
        except ServiceError as error:
            failure = error
            await context.abort(
                errors.status_of(error),
                error.message,
                ((errors.DETAIL_KEY, wire.dump_error(errors.to_detail(error, call_id))),),
            )
        except (asyncio.CancelledError, GeneratorExit):
            failure = Cancelled("the caller gave up")
            raise
        finally:
            self._in_flight.leave(finite)
            self._metrics.inflight.labels(method).dec()
            # While the answer is on its way: to count and to log takes as long as a small handler.
            asyncio.get_running_loop().call_soon(self._record, method, failure, time.monotonic() - started)

    def _record(self, method: str, failure: ServiceError | None, elapsed_s: float) -> None:
        code = "ok" if failure is None else failure.code
        self._metrics.requests.labels(method, code).inc()
        self._metrics.seconds.labels(method).observe(elapsed_s)
        if method.startswith("/grpc."):
            return
        extra = {"field": failure.field} if failure is not None and failure.field else {}
        _log.info("call", method=method, code=code, ms=round(elapsed_s * 1000, 3), **extra)


@asynccontextmanager
async def _mapped(seconds: float) -> AsyncIterator[None]:
    """Turns whatever a handler raises into a ServiceError; cancellation by the caller stays cancellation."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except ServiceError:
        raise
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineExceeded(f"not done after {seconds:.3g} s") from error
        raise _defect(error) from error
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc(error) from error
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception as error:
        raise _defect(error) from error


def _defect(error: Exception) -> Internal:
    _log.error("defect", error=type(error).__name__, frames=logs.frames(error))
    return Internal(f"internal error; the log has it under request id {request_id()}")


def _adopt_request_id(context: Context) -> str:
    """The caller's request id where it is sane, else a new one; bound to this task and its log lines."""
    metadata = dict(context.invocation_metadata() or ())
    given = metadata.get(REQUEST_ID_KEY, "")
    sane = isinstance(given, str) and 0 < len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii()
    call_id = given if sane else uuid4().hex
    _request_id.set(call_id)
    structlog.contextvars.bind_contextvars(request_id=call_id)
    return str(call_id)
