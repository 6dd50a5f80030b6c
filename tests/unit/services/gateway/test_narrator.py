"""A recipe that is lost: another is told everything again, and the client hears each word once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from fabric.errors import DeadlineExceeded, Exhausted, Internal, InvalidArgument, ServiceError, Unavailable
from protos.deepinfer.v1 import common_pb2, recipe_pb2
from services.gateway.narrator import Narrator
from services.gateway.recipes import Recipes
from services.gateway.recovery import Bounds, Recovery, RetryBudget
from services.gateway.tap import Batch

TOKENS = [[1], [2, 3], [4], [5, 6]]
STOP = common_pb2.FINISH_REASON_STOP
START = recipe_pb2.ParseStart(request_id="r")
# Each message of an answer, and the replies to all but the first.
STEPS = [*(f"send:{n}" for n in range(6)), *(f"reply:{n}" for n in range(5))]


class Recipe:
    """Numbers what it is told, so that a message that is lost or comes twice is seen. Ends at a `fault`, once."""

    def __init__(self, key: str, accent: str = "") -> None:
        self.key, self.accent = key, accent
        self.fault, self.error = "", ServiceError("none")
        self.streams: list[Stream] = []

    def reached(self, step: str) -> None:
        if step == self.fault:
            self.fault = ""
            raise self.error

    async def render(self, request: recipe_pb2.RenderRequest, request_id: str) -> recipe_pb2.RenderResponse:
        self.reached("render")
        return recipe_pb2.RenderResponse(token_ids=[7])

    def parse(self, request_id: str) -> Any:
        self.streams.append(Stream(self))
        return self.streams[-1]


class Stream:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._sent, self._heard = recipe, 0, 0
        self._replies: asyncio.Queue[recipe_pb2.ParseResponse] = asyncio.Queue()
        self.cancelled = self.told = False

    async def send(self, message: recipe_pb2.ParseRequest) -> None:
        self._recipe.reached(f"send:{self._sent}")
        event = recipe_pb2.ParseEvent(done=recipe_pb2.ParseDone(reason=message.finish.reason))
        if message.HasField("tokens"):
            event = recipe_pb2.ParseEvent(content=f"{self._sent}:{list(message.tokens.token_ids)}{self._recipe.accent}")
        if self._sent:
            self._replies.put_nowait(recipe_pb2.ParseResponse(events=[event]))
        self._sent += 1

    async def receive(self) -> recipe_pb2.ParseResponse:
        reply = await self._replies.get()
        self._recipe.reached(f"reply:{self._heard}")
        self._heard += 1
        return reply

    def cancel(self) -> None:
        self.cancelled = True


class Kitchen:
    """The recipes that answer, as the pool gives them, and one request's use of them."""

    def __init__(self, *recipes: Recipe) -> None:
        self.present, self.users = list(recipes), 0
        self.failures: list[tuple[str, str, bool]] = []
        recovery = Recovery(RetryBudget(0.0, 0.0, 9, lambda: 0.0), Bounds(), Random(1))
        self.recipes = Recipes("m", "r", self, recovery, lambda *told: self.failures.append(told))  # type: ignore[arg-type]
        self.recipes.open()

    @contextmanager
    def recipe(self, model: str, excluded: frozenset[str]) -> Iterator[Recipe]:
        able = [recipe for recipe in self.present if recipe.key not in excluded]
        if not able:
            raise Unavailable("no recipe service answers")
        self.users += 1
        try:
            yield able[0]
        finally:
            self.users -= 1

    async def whole(self) -> list[str]:
        """All that is said of one answer."""
        narrator, said = Narrator(self.recipes, START), list[str]()
        try:
            await narrator.open()
            for tokens in TOKENS[:-1]:
                said += [event.content for event in await narrator.tell(Batch(0, tokens))]
            told = await narrator.end(Batch(0, TOKENS[-1]), STOP, "", common_pb2.Usage())
            assert told.done.reason == STOP
            return said + [event.content for event in told.events]
        finally:
            narrator.close()
            self.recipes.close()
            assert self.users == 0 and all(stream.cancelled for one in self.present for stream in one.streams)


UNDISTURBED = [f"{number}:{tokens}" for number, tokens in enumerate(TOKENS, 1)]


async def test_an_undisturbed_answer_is_told_once() -> None:
    recipe = Recipe("a")
    assert await Kitchen(recipe).whole() == UNDISTURBED and len(recipe.streams) == 1


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [Unavailable("killed"), DeadlineExceeded("a limit of its own")])
async def test_wherever_a_recipe_is_lost_another_says_the_rest(step: str, error: ServiceError) -> None:
    first, second = Recipe("a"), Recipe("b")
    first.fault, first.error = step, error
    kitchen = Kitchen(first, second)
    assert await kitchen.whole() == UNDISTURBED
    assert kitchen.failures == [("parsing", error.code, True)] and len(second.streams) == 1


@pytest.mark.parametrize("step", STEPS)
async def test_a_recipe_that_is_lost_while_it_catches_up_is_followed_by_another(step: str) -> None:
    first, second, third = Recipe("a"), Recipe("b"), Recipe("c")
    first.fault, first.error = "reply:3", Unavailable("killed")
    second.fault, second.error = step, Unavailable("killed, too")
    assert await Kitchen(first, second, third).whole() == UNDISTURBED
    assert len(third.streams) == 1


async def test_without_another_recipe_the_end_is_clear_and_names_the_fix() -> None:
    recipe = Recipe("a")
    recipe.fault, recipe.error = "reply:1", Unavailable("killed")
    kitchen = Kitchen(recipe)
    narrator = Narrator(kitchen.recipes, START)
    await narrator.tell(Batch(0, [1]))
    kitchen.present.clear()
    with pytest.raises(Unavailable, match="no other answers") as caught:
        await narrator.tell(Batch(1, [2]))
    assert caught.value.fix and caught.value.retry_after_s
    assert kitchen.failures == [("parsing", "unavailable", False)] and kitchen.users == 0


async def test_the_only_recipe_is_used_again_where_it_answers_again() -> None:
    recipe = Recipe("a")
    recipe.fault, recipe.error = "reply:2", Unavailable("its connection broke")
    assert await Kitchen(recipe).whole() == UNDISTURBED and len(recipe.streams) == 2


async def test_a_recipe_that_reads_the_answer_differently_is_not_believed() -> None:
    first, second = Recipe("a"), Recipe("b", accent="!")
    first.fault, first.error = "reply:2", Unavailable("killed")
    with pytest.raises(Unavailable, match="differently") as caught:
        await Kitchen(first, second).whole()
    assert "same version" in caught.value.fix


@pytest.mark.parametrize("error", [InvalidArgument("bad"), Internal("bug")])
@pytest.mark.parametrize("step", ["render", "send:1", "reply:0"])
async def test_what_any_recipe_would_say_is_not_asked_again(step: str, error: ServiceError) -> None:
    first, second = Recipe("a"), Recipe("b")
    first.fault, first.error = step, error
    kitchen = Kitchen(first, second)
    with pytest.raises(type(error)) as caught:
        await kitchen.recipes.render(recipe_pb2.RenderRequest())
        await kitchen.whole()
    assert caught.value is error and kitchen.failures == [] and second.streams == []


@pytest.mark.parametrize("error", [Unavailable("killed"), Exhausted("too many wait")])
async def test_a_recipe_that_is_lost_before_it_rendered_costs_another_one_not_the_request(error: ServiceError) -> None:
    first, second = Recipe("a"), Recipe("b")
    first.fault, first.error = "render", error
    kitchen = Kitchen(first, second)
    assert (await kitchen.recipes.render(recipe_pb2.RenderRequest())).token_ids == [7]
    assert kitchen.failures == [("rendering", error.code, True)] and kitchen.users == 1
