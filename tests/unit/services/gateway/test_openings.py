"""Openings: how far a prompt lies inside a shared region."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import InvalidArgument, Unavailable
from protos.deepinfer.v1 import recipe_pb2
from services.gateway.openings import Openings, Shared, common_tokens
from services.gateway.regions import Opening, Region

WORDS = Region("words", b"w" * 32, Opening(text="abcd"))
TOKENS = Region("tokens", b"t" * 32, Opening(token_ids=(97, 98, 7)))
Render = Callable[[recipe_pb2.RenderRequest], Awaitable[recipe_pb2.RenderResponse]]


def rendering(asked: list[recipe_pb2.RenderRequest], error: Exception | None = None) -> Render:
    """A recipe whose tokens are characters."""

    async def render(request: recipe_pb2.RenderRequest) -> recipe_pb2.RenderResponse:
        asked.append(request)
        if error is not None:
            raise error
        return recipe_pb2.RenderResponse(token_ids=request.text.encode() or request.body)

    return render


async def shared(regions: Sequence[Region], prompt: bytes) -> Shared | None:
    return await Openings().shared(regions, "m", tuple(prompt), rendering([]))


async def test_a_prompt_is_shared_as_far_as_it_is_the_regions() -> None:
    assert await shared([WORDS], b"abcde") == Shared(WORDS.salt, 4)
    assert await shared([WORDS], b"abx") == Shared(WORDS.salt, 2)
    assert await shared([WORDS], b"xabcd") is None
    assert await shared([], b"abcd") is None


async def test_the_longest_region_counts_and_of_equal_ones_the_first() -> None:
    assert await shared([TOKENS, WORDS], b"abcd") == Shared(WORDS.salt, 4)
    assert await shared([TOKENS, WORDS], b"abx") == Shared(TOKENS.salt, 2)


async def test_a_region_is_rendered_once_for_each_model_and_tokens_never() -> None:
    openings, asked = Openings(), list[recipe_pb2.RenderRequest]()
    for model in ("m", "m", "n"):
        await openings.shared([WORDS, TOKENS], model, (97,), rendering(asked))
    assert [request.text for request in asked] == ["abcd", "abcd"]


async def test_a_region_that_no_recipe_takes_fails_nobody_and_is_not_tried_again() -> None:
    openings, asked = Openings(), list[recipe_pb2.RenderRequest]()
    for _ in range(2):
        refusing = rendering(asked, InvalidArgument("too long", field="text"))
        assert await openings.shared([WORDS], "m", (97,), refusing) is None
    assert len(asked) == 1


async def test_a_recipe_that_is_away_is_asked_again_by_the_next_request() -> None:
    openings, asked = Openings(), list[recipe_pb2.RenderRequest]()
    with pytest.raises(Unavailable):
        await openings.shared([WORDS], "m", (97,), rendering(asked, Unavailable("away")))
    assert await openings.shared([WORDS], "m", (97,), rendering(asked)) == Shared(WORDS.salt, 1)


def test_a_system_message_is_rendered_as_a_chat() -> None:
    request = Opening(system="be kind").render("m")
    assert request.dialect == recipe_pb2.DIALECT_OPENAI_CHAT and b"be kind" in request.body


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_tokens_are_equal_and_end_at_a_difference(one: list[int], other: list[int]) -> None:
    count = common_tokens(one, other)
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]
