"""A client of the gateway's OpenAI-compatible endpoint. Knows HTTP and server-sent events, keeps no conversation."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx2

from fabric.errors import DeadlineExceeded, ServiceError, Unavailable


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """How a finished answer went. first_token_s: from the request to the first piece; tokens_per_s: after it."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    first_token_s: float
    total_s: float

    @property
    def tokens_per_s(self) -> float:
        after_first_s = self.total_s - self.first_token_s
        return (self.completion_tokens - 1) / after_first_s if after_first_s > 0 and self.completion_tokens > 1 else 0.0


class GatewayClient:
    """`async with GatewayClient("http://127.0.0.1:8000") as client`. Raises ServiceErrors with the gateway's words."""

    def __init__(
        self,
        url: str,
        api_key: str = "",
        timeout_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url
        self._clock = clock
        self._http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout_s, transport=transport)

    async def models(self) -> list[str]:
        """Names of the models served."""
        async with self._errors_named():
            reply = await self._http.get("/v1/models")
            await _raise_for_status(reply)
            return [model["id"] for model in reply.json()["data"]]

    async def chat(self, body: dict[str, Any]) -> AsyncIterator[Delta | Summary]:
        """Pieces of the answer to an OpenAI chat request as they come, and a Summary at the end."""
        asked_at, first_at = self._clock(), 0.0
        reason = ""
        usage: dict[str, Any] = {}
        async for chunk in self._chunks(body | {"stream": True, "stream_options": {"include_usage": True}}):
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                first_at = first_at or self._clock()
                reason = choice.get("finish_reason") or reason
                yield _delta(choice.get("delta", {}))
        if not reason:
            raise Unavailable("the stream ended before the answer did", fix="ask again")
        yield self._summary(reason, usage, asked_at, first_at)

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def _summary(self, reason: str, usage: dict[str, Any], asked_at: float, first_at: float) -> Summary:
        return Summary(
            finish_reason=reason,
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            first_token_s=first_at - asked_at,
            total_s=self._clock() - asked_at,
        )

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._errors_named(), self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            await _raise_for_status(reply)
            async for line in reply.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data and data != "[DONE]":
                    chunk = json.loads(data)
                    _raise_for_error(chunk)
                    yield chunk

    @asynccontextmanager
    async def _errors_named(self) -> AsyncIterator[None]:
        try:
            yield
        except httpx2.TimeoutException as error:
            raise DeadlineExceeded(f"{self._url} did not answer in time", fix="see `deepinfer doctor`") from error
        except httpx2.TransportError as error:
            raise Unavailable(f"{self._url} cannot be reached", fix="start a stack with `deepinfer up`") from error


async def _raise_for_status(reply: httpx2.Response) -> None:
    if reply.status_code == 200:
        return
    await reply.aread()
    try:
        body = reply.json()
    except ValueError:
        body = {}
    _raise_for_error(body)
    raise ServiceError(f"HTTP {reply.status_code}: {reply.text[:200]}")


def _raise_for_error(body: dict[str, Any]) -> None:
    error = body.get("error")
    if error:
        message, param = error.get("message", "failed"), error.get("param") or ""
        raise ServiceError(message, field="" if param in message else param, fix=error.get("fix") or "")


def _delta(delta: dict[str, Any]) -> Delta:
    return Delta(
        reasoning=delta.get("reasoning_content") or "",
        content=delta.get("content") or "",
        tool_calls=tuple(delta.get("tool_calls") or ()),
    )
