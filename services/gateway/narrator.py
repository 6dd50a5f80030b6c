"""One answer told to a recipe: tokens become what the client reads. Knows the recipe's messages, not their dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fabric.errors import ServiceError, Unavailable
from protos.deepinfer.v1 import common_pb2, recipe_pb2
from services.gateway.peers import ParseStream
from services.gateway.recipes import Recipes
from services.gateway.tap import Batch


@dataclass(frozen=True, slots=True)
class Told:
    """The last events of an answer and how it ended in the client's terms."""

    events: list[recipe_pb2.ParseEvent]
    done: recipe_pb2.ParseDone


class Narrator:
    """Opened while the prompt is still computed, so that its start costs nothing.

    Parsing is a function of the messages so far. Where the recipe is lost, another one gets all of them again, in the
    same portions, and what it answers to those was passed on before.
    """

    def __init__(self, recipes: Recipes, start: recipe_pb2.ParseStart) -> None:
        self._recipes, self._start = recipes, start
        self._stream: ParseStream | None = None
        self._told: list[bytes] = []  # serialized: a tenth of the memory
        self._said_bytes = 0  # by the recipe, in reply to them

    async def open(self) -> None:
        """Starts the stream unless it runs already.

        Raises:
            ServiceError: nobody is left to parse the answer, or another recipe reads what was told differently.
        """
        await self._opened()

    async def tell(self, batch: Batch) -> list[recipe_pb2.ParseEvent]:
        """Events that a batch completes. Raises as `open` does."""
        return await self._exchange([_tokens(batch)])

    async def end(self, batch: Batch, reason: common_pb2.FinishReason, stop: str, usage: common_pb2.Usage) -> Told:
        """Events of the last batch and of the end. Raises as `open` does."""
        finish = recipe_pb2.ParseRequest(finish=recipe_pb2.ParseFinish(reason=reason, stop=stop, usage=usage))
        events = await self._exchange([_tokens(batch), finish] if batch.token_ids else [finish])
        last = events.pop() if events else recipe_pb2.ParseEvent()
        if last.WhichOneof("event") != "done":
            raise Unavailable("the recipe ended without saying how", fix="retry")
        return Told(events, last.done)

    def close(self) -> None:
        """Forgets what was told; `open` begins anew."""
        self._told, self._said_bytes = [], 0
        self._cut()

    async def _exchange(self, messages: list[recipe_pb2.ParseRequest]) -> list[recipe_pb2.ParseEvent]:
        """Tells all messages and returns the events of all replies: of a part of them nothing is passed on."""
        while True:
            stream = await self._opened()
            try:
                await _send(stream, messages)
                replies = [await _reply(stream) for _ in messages]
                break
            except ServiceError as error:
                self._cut()
                await self._recipes.lost(error, "parsing")
        self._told += [message.SerializeToString() for message in messages]
        self._said_bytes += sum(reply.ByteSize() for reply in replies)
        return [event for reply in replies for event in reply.events]

    async def _opened(self) -> ParseStream:
        while self._stream is None:
            try:
                self._stream = await self._begun()
            except ServiceError as error:
                await self._recipes.lost(error, "parsing")
        return self._stream

    async def _begun(self) -> ParseStream:
        """A stream whose recipe knows all that was told."""
        stream = self._recipes.parse()
        try:
            await stream.send(recipe_pb2.ParseRequest(start=self._start))
            if self._told and await _said_again(stream, self._told) != self._said_bytes:
                fix = "run the same version of the same model in all recipes"
                raise Unavailable("another recipe reads the answer differently", fix=fix, retryable=False)
        except BaseException:
            stream.cancel()
            raise
        return stream

    def _cut(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None


async def _send(stream: ParseStream, messages: Iterable[recipe_pb2.ParseRequest]) -> None:
    for message in messages:
        await stream.send(message)


async def _said_again(stream: ParseStream, told: Sequence[bytes]) -> int:
    """Bytes of the replies to everything that was told. They are read while more is sent: all buffers are bounded."""
    known = map(recipe_pb2.ParseRequest.FromString, told)
    sending = asyncio.create_task(_send(stream, known), name="telling again")
    hearing = asyncio.create_task(_heard(stream, len(told)), name="hearing again")
    try:
        await asyncio.wait((sending, hearing), return_when=asyncio.FIRST_EXCEPTION)
        if sending.done():
            sending.result()
        return await hearing
    finally:
        for task in (sending, hearing):
            task.cancel()
        await asyncio.gather(sending, hearing, return_exceptions=True)


async def _heard(stream: ParseStream, count: int) -> int:
    return sum([(await _reply(stream)).ByteSize() for _ in range(count)])


async def _reply(stream: ParseStream) -> recipe_pb2.ParseResponse:
    reply = await stream.receive()
    if reply is None:
        raise Unavailable("the recipe ended early", fix="retry")
    return reply


def _tokens(batch: Batch) -> recipe_pb2.ParseRequest:
    return recipe_pb2.ParseRequest(tokens=recipe_pb2.ParseTokens(token_ids=batch.token_ids, logprobs=batch.logprobs))
