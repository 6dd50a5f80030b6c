"""One HTTP request for a chat completion, from its first byte to its last. Knows ASGI and our events, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import asdict
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fabric import deadline
from fabric.errors import DeadlineExceeded, Internal, ServiceError
from fabric.telemetry import logs
from services.gateway import http_errors, intake
from services.gateway.front import Front
from services.gateway.http_errors import BodyTooLarge
from services.gateway.job import Job, Update
from services.gateway.tenants import Tenant

_log = logs.get("http")
_JSON = {"content-type": "application/json"}
# Buffering by a proxy would undo streaming.
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class ChatExchange(Response):
    """Reads, answers and watches the client: when it leaves, everything done for it is cancelled."""

    def __init__(self, front: Front, max_body_bytes: int, timeout_s: float) -> None:
        self._front, self._max_body_bytes, self._timeout_s = front, max_body_bytes, timeout_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = _Reply(send)
        try:
            authorization = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            tenant = self._front.tenants.identify(authorization)
            body = await _body(scope, receive, self._max_body_bytes)
            job = intake.chat_from_body(body, self._front.stamp(tenant, "chatcmpl-"))
            await _while_connected(receive, self._answer(tenant, job, reply))
        except ServiceError as error:
            await reply.fail(error)

    async def _answer(self, tenant: Tenant, job: Job, reply: _Reply) -> None:
        deadline.enter(self._timeout_s)
        reply.request_id = job.request_id
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._do(tenant, job, reply)
        except TimeoutError as error:
            raise DeadlineExceeded(f"not done after {self._timeout_s:.3g} s", fix="ask for fewer tokens") from error
        except ServiceError:
            raise
        except Exception as error:
            _log.error("defect", error=type(error).__name__, frames=logs.frames(error), request_id=job.request_id)
            raise Internal(f"internal error; the log has it under request id {job.request_id}") from error

    async def _do(self, tenant: Tenant, job: Job, reply: _Reply) -> None:
        async with self._front.answer(tenant, job, "http_chat") as updates:
            await (reply.stream(updates) if job.stream else reply.whole(updates))


class PrefetchExchange(ChatExchange):
    """The same body, but nothing is generated: what is kept of its prompt is brought to memory."""

    async def _do(self, tenant: Tenant, job: Job, reply: _Reply) -> None:
        found = await self._front.prefetch(tenant, job, "http_prefetch")
        await reply.plain({"id": job.request_id, "object": "prefetch", "model": job.model, **asdict(found)})


class _Reply:
    """Writes one HTTP response: a status can only be chosen before the first byte."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self.request_id = ""

    async def stream(self, updates: AsyncIterator[Update]) -> None:
        """One write per update, however many events it holds."""
        async for update in updates:
            events = b"".join(b"data: " + event.wire + b"\n\n" for event in update.events if event.wire)
            if update.finish is not None:
                events += b"data: [DONE]\n\n"
            if events:
                await self._start(200, _EVENTS)
                await self._write(events, more=update.finish is None)

    async def whole(self, updates: AsyncIterator[Update]) -> None:
        """The one body that comes with the last update."""
        body = b""
        async for update in updates:
            body += b"".join(event.wire for event in update.events)
        await self._start(200, _JSON | {"content-length": str(len(body))})
        await self._write(body, more=False)

    async def plain(self, value: dict[str, Any]) -> None:
        """One JSON object."""
        body = json.dumps(value).encode()
        await self._start(200, _JSON | {"content-length": str(len(body))})
        await self._write(body, more=False)

    async def fail(self, error: ServiceError) -> None:
        """A status and an error object or, where events went out already, the error as the last event."""
        body = http_errors.body_of(error)
        if self._started:
            await self._write(b"data: " + body + b"\n\n", more=False)
            return
        headers = _JSON | http_errors.headers_of(error) | {"content-length": str(len(body))}
        await self._start(http_errors.status_of(error), headers)
        await self._write(body, more=False)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        if self._started:
            return
        self._started = True
        named = headers | ({"x-request-id": self.request_id} if self.request_id else {})
        pairs = [(name.encode(), value.encode()) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def _body(scope: Scope, receive: Receive, most: int) -> bytes:
    """Raises BodyTooLarge as soon as that is certain, often before the body came."""
    declared = dict(scope["headers"]).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > most:
            raise _too_large(most)
    return b"".join(parts)


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {most} bytes", field="body", fix="shorten the request")


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or cancels it when the client goes away."""
    working = asyncio.create_task(work, name="answer")
    gone = asyncio.create_task(_disconnect(receive), name="client")
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
    if not working.cancelled():
        working.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
