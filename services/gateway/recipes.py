"""Recipes: one request's recipe instances, one after the other. Knows who was lost; reads no token and no text."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from fabric import deadline
from fabric.errors import ServiceError, Unavailable
from fabric.telemetry import logs
from protos.deepinfer.v1 import recipe_pb2
from services.gateway.lives import Observe
from services.gateway.peers import ParseStream, Recipe
from services.gateway.recovery import Recovery, worth_it
from services.gateway.workers import Workers

_log = logs.get("recipes")


class Recipes:
    """`open` takes one, `render` and `parse` use it, `lost` turns to another; `close` gives the last one back.

    Whatever a recipe says is a function of what it was told, so that another can say it again.
    """

    def __init__(self, model: str, request_id: str, workers: Workers, recovery: Recovery, observe: Observe) -> None:
        self._model, self._request_id = model, request_id
        self._workers, self._recovery, self._observe = workers, recovery, observe
        self._failed: set[str] = set()
        self._held = ExitStack()
        self._current: Recipe | None = None

    def open(self) -> None:
        """Raises NotFound or Unavailable where nobody serves the model, or no recipe answers."""
        self._take(frozenset())

    async def render(self, request: recipe_pb2.RenderRequest) -> recipe_pb2.RenderResponse:
        """The prompt that `request` stands for.

        Raises:
            ServiceError: the request is wrong, or nobody is left to render it.
        """
        while True:
            try:
                return await self._present().render(request, self._request_id)
            except ServiceError as error:
                await self.lost(error, "rendering")

    def parse(self) -> ParseStream:
        """A new Parse stream at the present recipe."""
        return self._present().parse(self._request_id)

    async def lost(self, error: ServiceError, when: str) -> None:
        """Turns to another instance after `error`, or to the same one where nobody else is there and it answers again.

        Raises:
            ServiceError: `error`, where another would say the same or enough were tried. Unavailable: nobody is left.
        """
        left_s = deadline.remaining_s()
        if not worth_it(error, left_s):
            raise error
        key = self._present().key
        self.close()
        self._failed.add(key)
        pause_s = self._recovery.pause_s(error, False, left_s)
        goes_on = pause_s is not None and await self._another(pause_s)
        self._observe(when, error.code, goes_on)
        _log.info("recipe failed", request_id=self._request_id, when=when, recipe=key, error=error.code, next=goes_on)
        if pause_s is None:
            raise error
        if not goes_on:
            fix = "retry; if it stays, start another recipe"
            raise Unavailable("the recipe was lost and no other answers", fix=fix, retry_after_s=1.0) from error

    def close(self) -> None:
        """Gives the present one back; safe to repeat."""
        self._current = None
        self._held.close()

    async def _another(self, pause_s: float) -> bool:
        await asyncio.sleep(pause_s)  # by then the pool knows of a connection that broke
        for excluded in (frozenset(self._failed), frozenset[str]()):
            try:
                self._take(excluded)
            except ServiceError:
                continue
            return True
        return False

    def _take(self, excluded: frozenset[str]) -> None:
        self._current = self._held.enter_context(self._workers.recipe(self._model, excluded))

    def _present(self) -> Recipe:
        if self._current is None:
            raise RuntimeError("used before open")
        return self._current
