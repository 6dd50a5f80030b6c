"""Client side of gRPC: a channel per address that notices dead and frozen peers, and calls that obey deadlines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from fabric import deadline, errors
from fabric.interceptors import REQUEST_ID_KEY, request_id

MAX_MESSAGE_BYTES = 32 << 20
# A frozen peer gets no work after 2 s (promise 16): the two together, and some time to notice and tell.
_PING_EVERY_MS = 1000
_PING_TIMEOUT_MS = 850
_CONNECT_TIMEOUT_MS = 2000

StubT = TypeVar("StubT")

# Only UNAVAILABLE is retried, only before the first reply, and throttled so that a dead peer is not stormed.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "0.5s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
)

# keepalive alone does not notice a frozen peer: `grpc.http2.ping_timeout_ms` is what cuts the connection.
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", _PING_EVERY_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Not a pause: how long one attempt to connect may take. A busy peer needs more than its usual millisecond.
    ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", _SERVICE_CONFIG),
    # Two clients of one process must not share a connection whose loss would hit both.
    ("grpc.use_local_subchannel_pool", 1),
)


class Channels:
    """The channels of one process, opened on first use and closed together.

    `async with Channels() as channels: stub = channels.stub(DecodeServiceStub, address)`
    """

    def __init__(self) -> None:
        self._open: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`; connecting happens with the first call."""
        channel = self._open.get(address)
        if channel is None:
            channel = self._open[address] = grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))
        return channel

    def stub(self, make: Callable[[Any], StubT], address: str) -> StubT:
        """A stub of the generated class `make` on the channel to `address`."""
        return make(self.get(address))

    async def drop(self, address: str) -> None:
        """Closes the channel to a peer that left; its running calls are cancelled."""
        channel = self._open.pop(address, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        while self._open:
            _, channel = self._open.popitem()
            await channel.close()

    async def __aenter__(self) -> Channels:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def call(method: Any, request: Any, *, timeout_s: float | None = None) -> Any:
    """One reply of a unary method of a stub.

    Args:
        method: bound stub method, such as `stub.Reserve`.
        request: its message, or an async iterator of messages where the method takes a stream.
        timeout_s: seconds to wait at most; what the current deadline has left, if that is less.

    Raises:
        ServiceError: what the peer raised, or what the transport met.
    """
    with _mapped():
        return await method(request, timeout=deadline.shrunk_s(timeout_s), metadata=_metadata())


async def stream(method: Any, request: Any, *, timeout_s: float | None = None) -> AsyncIterator[Any]:
    """The replies of a streaming method; arguments and errors as in `call`.

    Leaving the loop early cancels the call: iterate inside `contextlib.aclosing`.
    """
    running = method(request, timeout=deadline.shrunk_s(timeout_s), metadata=_metadata())
    try:
        with _mapped():
            async for reply in running:
                yield reply
    finally:
        running.cancel()


@contextmanager
def _mapped() -> Iterator[None]:
    """The transport's errors as ours. A channel that was closed under a call looks like the caller's cancellation."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise errors.Unavailable("the channel to the peer was closed") from error
    except grpc.aio.UsageError as error:
        raise errors.Unavailable("the channel to the peer is closed") from error


def _metadata() -> tuple[tuple[str, str], ...]:
    current = request_id()
    return ((REQUEST_ID_KEY, current),) if current else ()
