"""One Parse stream: tokens become what the client reads. Knows the recipe's messages, not their dialect."""

from __future__ import annotations

from dataclasses import dataclass

from fabric.errors import Unavailable
from protos.deepinfer.v1 import common_pb2, recipe_pb2
from services.gateway.peers import ParseStream, Recipe
from services.gateway.tap import Batch


@dataclass(frozen=True, slots=True)
class Told:
    """The last events of an answer and how it ended in the client's terms."""

    events: list[recipe_pb2.ParseEvent]
    done: recipe_pb2.ParseDone


class Narrator:
    """Opened while the prompt is still computed, so that its start costs nothing."""

    def __init__(self, recipe: Recipe, start: recipe_pb2.ParseStart) -> None:
        self._recipe, self._start = recipe, start
        self._stream: ParseStream | None = None

    async def open(self) -> None:
        """Starts the stream unless it runs already."""
        if self._stream is None:
            self._stream = self._recipe.parse(self._start.request_id)
            await self._stream.send(recipe_pb2.ParseRequest(start=self._start))

    async def tell(self, batch: Batch) -> list[recipe_pb2.ParseEvent]:
        """Events that a batch completes."""
        stream = self._opened()
        await stream.send(recipe_pb2.ParseRequest(tokens=_tokens(batch)))
        return await self._events(stream)

    async def end(self, batch: Batch, reason: common_pb2.FinishReason, stop: str, usage: common_pb2.Usage) -> Told:
        """Events of the last batch and of the end."""
        stream = self._opened()
        if batch.token_ids:
            await stream.send(recipe_pb2.ParseRequest(tokens=_tokens(batch)))
        finish = recipe_pb2.ParseFinish(reason=reason, stop=stop, usage=usage)
        await stream.send(recipe_pb2.ParseRequest(finish=finish))
        await stream.done()
        events = await self._events(stream) if batch.token_ids else []
        events += await self._events(stream)
        last = events.pop() if events else recipe_pb2.ParseEvent()
        if last.WhichOneof("event") != "done":
            raise Unavailable("the recipe ended without saying how", fix="retry")
        return Told(events, last.done)

    def close(self) -> None:
        """Forgets what was told; `open` begins anew."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    def _opened(self) -> ParseStream:
        if self._stream is None:
            raise RuntimeError("tell before open")
        return self._stream

    async def _events(self, stream: ParseStream) -> list[recipe_pb2.ParseEvent]:
        reply = await stream.receive()
        if reply is None:
            raise Unavailable("the recipe ended early", fix="retry")
        return list(reply.events)


def _tokens(batch: Batch) -> recipe_pb2.ParseTokens:
    return recipe_pb2.ParseTokens(token_ids=batch.token_ids, logprobs=batch.logprobs)
