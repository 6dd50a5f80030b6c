"""Openings: how far a prompt lies inside a region that its tenant shares. Knows tokens; derives no key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fabric.errors import InvalidArgument
from fabric.telemetry import logs
from protos.deepinfer.v1 import recipe_pb2
from services.gateway.regions import Region

_log = logs.get("regions")
Render = Callable[[recipe_pb2.RenderRequest], Awaitable[recipe_pb2.RenderResponse]]


@dataclass(frozen=True, slots=True)
class Shared:
    """The first `tokens` tokens of a prompt are those of a region with this salt."""

    salt: bytes
    tokens: int


class Openings:
    """Remembers the tokens of each region for each model that was asked for."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str], tuple[int, ...]] = {}

    async def shared(
        self, regions: Sequence[Region], model: str, token_ids: Sequence[int], render: Render
    ) -> Shared | None:
        """The longest common start of a prompt and a region, of equally long ones the first; None where none is.

        Raises:
            ServiceError: a region was not rendered yet and no recipe answers.
        """
        found: Shared | None = None
        for region in regions:
            tokens = common_tokens(await self._opening(region, model, render), token_ids)
            if tokens > (found.tokens if found is not None else 0):
                found = Shared(region.salt, tokens)
        return found

    async def _opening(self, region: Region, model: str, render: Render) -> tuple[int, ...]:
        if region.opening.token_ids:
            return region.opening.token_ids
        key = (region.name, model)
        if key not in self._tokens:
            try:
                self._tokens[key] = tuple((await render(region.opening.render(model))).token_ids)
            except InvalidArgument as error:  # of the region, not of this request: nothing is shared, nothing fails
                _log.warning("a region cannot be rendered", region=region.name, field=error.field, fix=error.fix)
                self._tokens[key] = ()
        return self._tokens[key]


def common_tokens(opening: Sequence[int], token_ids: Sequence[int]) -> int:
    """Leading tokens in which both agree."""
    count = min(len(opening), len(token_ids))
    differ = np.flatnonzero(np.asarray(opening[:count]) != np.asarray(token_ids[:count]))
    return int(differ[0]) if len(differ) else count
