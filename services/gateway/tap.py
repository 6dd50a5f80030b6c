"""Tokens of one answer as decode sends them, gathered for whoever is ready. Knows no text and no client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fabric.errors import Internal, ServiceError, Unavailable
from protos.deepinfer.v1 import common_pb2, decode_pb2
from services.gateway.ledger import Ledger
from services.gateway.peers import TokenStream

# A client that reads slowly makes us stop reading here; flow control then holds decode's sender.
MAX_BUFFERED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive tokens; `logprobs` one per token or none; `finish` on the last batch."""

    first_index: int
    token_ids: Sequence[int]
    logprobs: Sequence[common_pb2.TokenLogprob] = ()
    finish: decode_pb2.DecodeFinish | None = None


class Tap:
    """Reads one Generate stream ahead of its consumer, so that whatever came meanwhile leaves as one batch."""

    def __init__(self, stream: TokenStream, ledger: Ledger, logprobs: bool) -> None:
        self._stream, self._ledger, self._wants_logprobs = stream, ledger, logprobs
        self._tokens: list[int] = []
        self._logprobs: list[common_pb2.TokenLogprob] = []
        self._finish: decode_pb2.DecodeFinish | None = None
        self._error: ServiceError | None = None
        self._ended = False
        self._ready, self._room, self._last = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._read(), name="tap")

    @property
    def reading(self) -> asyncio.Task[None]:
        """Done when the stream has ended, however."""
        return self._task

    async def take(self, most: int | None = None) -> Batch:
        """All tokens that arrived since the last call, or the first `most` of them; at least one or the finish.

        Raises:
            ServiceError: what ended the stream early, once every token before it was taken.
        """
        await self._ready.wait()
        if not self._tokens and self._finish is None:
            raise self._error or Unavailable("decode ended without a finish", fix="retry")
        first = self._ledger.completion_tokens - len(self._tokens)
        tokens, logprobs = self._tokens[:most], self._logprobs[:most]
        self._tokens, self._logprobs = self._tokens[len(tokens) :], self._logprobs[len(logprobs) :]
        self._room.set()
        if self._tokens:
            return Batch(first, tokens, logprobs)
        if not self._ended:
            self._ready.clear()
        finish, self._finish = self._finish, None
        return Batch(first, tokens, logprobs, finish)

    async def arrived(self) -> None:
        """Returns when `take` has something to give or to raise."""
        await self._ready.wait()

    async def gather(self, window_s: float) -> None:
        """Lets tokens come in for `window_s` seconds, or until the last one has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(window_s):
                await self._last.wait()

    def close(self) -> None:
        """Ends the stream; safe to repeat."""
        self._task.cancel()
        self._stream.cancel()

    async def _read(self) -> None:
        try:
            while (message := await self._stream.receive()) is not None:
                self._add(message)
                if len(self._tokens) >= MAX_BUFFERED_TOKENS:
                    self._room.clear()
                    await self._room.wait()
        except ServiceError as error:
            self._error = error
        finally:
            self._ended = True
            self._last.set()
            self._ready.set()

    def _add(self, message: decode_pb2.DecodeServiceGenerateResponse) -> None:
        count = len(message.token_ids)
        if len(message.logprobs) != (count if self._wants_logprobs else 0):
            raise Internal(f"decode sent {len(message.logprobs)} logprobs for {count} tokens")
        if count:
            self._ledger.take(message.first_index, count)
            self._tokens += message.token_ids
            self._logprobs += message.logprobs
        if message.HasField("finish"):
            self._finish = message.finish
            self._last.set()
        if count or message.HasField("finish"):
            self._ready.set()
