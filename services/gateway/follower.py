"""Following one worker: its Info, its Watch stream, a probe while it is silent. Knows when to call it lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from grpc_health.v1 import health_pb2, health_pb2_grpc

from fabric.errors import DeadlineExceeded, ServiceError
from fabric.telemetry import logs
from protos.deepinfer.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    recipe_pb2,
    recipe_pb2_grpc,
)
from services.gateway import rpc
from services.gateway.link import Link
from services.gateway.mirror import Doubt
from services.gateway.standing import Limits, Standing

_log = logs.get("pool")
_BACKOFF_S = (0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker may be silent: after `probe_s` it is asked, after `stale_s` it gets no work.

    A broken connection ends its use at once; a frozen process breaks its connection, see fabric.channels.
    """

    probe_s: float
    stale_s: float


class Side(Protocol):
    """How to ask one kind of worker."""

    async def limits(self, timeout_s: float) -> Limits: ...

    def watch(self) -> AsyncGenerator[common_pb2.WorkerStatus, None]: ...


class PrefillSide:
    """Info and Watch of a prefill worker."""

    def __init__(self, link: Link) -> None:
        self._stub: Any = link.stub(prefill_pb2_grpc.PrefillServiceStub)

    async def limits(self, timeout_s: float) -> Limits:
        info = await rpc.unary(self._stub.Info, prefill_pb2.PrefillServiceInfoRequest(), "", timeout_s)
        return Limits(info.model, info.epoch, info.max_prompt_tokens, 1)

    async def watch(self) -> AsyncGenerator[common_pb2.WorkerStatus, None]:
        async with aclosing(_messages(self._stub.Watch(prefill_pb2.PrefillServiceWatchRequest()))) as messages:
            async for message in messages:
                yield message.status


class DecodeSide:
    """Info and Watch of a decode worker."""

    def __init__(self, link: Link) -> None:
        self._stub: Any = link.stub(decode_pb2_grpc.DecodeServiceStub)

    async def limits(self, timeout_s: float) -> Limits:
        info = await rpc.unary(self._stub.Info, decode_pb2.DecodeServiceInfoRequest(), "", timeout_s)
        return Limits(info.model, info.epoch, info.max_total_tokens, info.max_sequences)

    async def watch(self) -> AsyncGenerator[common_pb2.WorkerStatus, None]:
        async with aclosing(_messages(self._stub.Watch(decode_pb2.DecodeServiceWatchRequest()))) as messages:
            async for message in messages:
                yield message.status


class RecipeSide:
    """Info and health of a recipe: it has no load to report, but its stream breaks when its process does."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stub: Any = link.stub(recipe_pb2_grpc.RecipeServiceStub)
        self._health: Any = link.stub(health_pb2_grpc.HealthStub)

    async def limits(self, timeout_s: float) -> Limits:
        info = await rpc.unary(self._stub.Info, recipe_pb2.RecipeServiceInfoRequest(), "", timeout_s)
        model = common_pb2.ModelInfo(name=info.model, vocab_size=info.vocab_size)
        return Limits(model, self._link.member.epoch, 0, 1)

    async def watch(self) -> AsyncGenerator[common_pb2.WorkerStatus, None]:
        async with aclosing(_messages(self._health.Watch(health_pb2.HealthCheckRequest()))) as messages:
            async for health in messages:
                yield common_pb2.WorkerStatus(draining=health.status != health_pb2.HealthCheckResponse.SERVING)


class Follower:
    """Keeps a Standing true until cancelled. `publish` is told of each new standing."""

    def __init__(
        self,
        key: str,
        side: Side,
        publish: Callable[[Standing], None],
        clock: Callable[[], float],
        patience: Patience,
        doubted: Callable[[Doubt], None] = lambda doubt: None,
    ) -> None:
        self._key, self._side, self._publish = key, side, publish
        self._clock, self._patience, self._doubted = clock, patience, doubted

    async def run(self) -> None:
        """Connects, follows, and on any loss tries again, for ever."""
        backoff_s, standing = _BACKOFF_S[0], None
        while True:
            try:
                limits = await self._side.limits(self._patience.stale_s)
                if standing is None or standing.limits != limits:
                    standing = Standing(self._key, limits, self._clock, self._doubted)
                    self._publish(standing)
                standing.seen()
                backoff_s = _BACKOFF_S[0]
                await self._follow(standing)
            except* ServiceError as errors:
                if standing is not None:
                    standing.lost()
                kinds = sorted({type(error).__name__ for error in errors.exceptions})
                _log.info("worker lost", worker=self._key, error=kinds)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _BACKOFF_S[1])

    async def _follow(self, standing: Standing) -> None:
        """Ends with the Watch stream, with a failed probe, or where a new stream would tell what this one did not."""
        async with asyncio.TaskGroup() as group, aclosing(self._side.watch()) as statuses:
            probing = group.create_task(self._probe(standing))
            async for status in statuses:
                standing.report(status)
                if standing.mirror.wants_whole:
                    break
            probing.cancel()

    async def _probe(self, standing: Standing) -> None:
        """A worker whose load does not change sends nothing: ask it, so that silence never means health."""
        while True:
            await asyncio.sleep(self._patience.probe_s)
            if self._clock() - standing.seen_at >= self._patience.probe_s:
                with suppress(DeadlineExceeded):  # busy or stuck: only time tells, and `usable` does the telling
                    await self._side.limits(self._patience.stale_s)
                    standing.seen()


async def _messages(call: Any) -> AsyncGenerator[Any, None]:
    stream: rpc.GrpcStream[Any, Any] = rpc.GrpcStream(call)
    try:
        while (message := await stream.receive()) is not None:
            yield message
    finally:
        stream.cancel()
