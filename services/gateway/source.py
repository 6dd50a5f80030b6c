"""Source: the tokens of one answer in order, each once, whatever happens to the workers behind it. Knows no text."""

from __future__ import annotations

import asyncio

from fabric import failpoints
from fabric.errors import ServiceError
from services.gateway.handoff import Handoff
from services.gateway.ledger import Ledger
from services.gateway.lives import Lives
from services.gateway.tap import Batch, Tap

_TOKENS = failpoints.declare("gateway.tokens")  # tokens after the first arrived, the client has not got them


# A wait shorter than this share of the window would cost more than it gathers.
_WORTH_IT = 0.5


class Source:
    """Begins with an open tap; when that breaks, other workers go on from the tokens that were given.

    Portions follow each other by about `coalesce_s` at least. Decode was asked to send them so; what it sends faster is
    gathered here.
    """

    def __init__(self, lives: Lives, handoff: Handoff, ledger: Ledger, tap: Tap, coalesce_s: float) -> None:
        self._lives, self._handoff, self._ledger, self._tap = lives, handoff, ledger, tap
        self._coalesce_s, self._clock = coalesce_s, asyncio.get_running_loop().time
        self._taken_at = self._clock()

    async def take(self) -> Batch:
        """The next tokens, the finish or both.

        Raises:
            ServiceError: nobody can go on, or nobody should.
        """
        if self._coalesce_s:
            await self._gather()
        try:
            batch = await self._tap.take()
        except ServiceError as error:
            finish = self._lives.passage.finish()  # only the word of the end was lost
            batch = Batch(self._ledger.completion_tokens, [], finish=finish) if finish else await self._elsewhere(error)
        self._lives.passage.confirmed(batch.token_ids)
        await _TOKENS.reached()
        return batch

    async def _gather(self) -> None:
        await self._tap.arrived()
        wait_s = self._taken_at + self._coalesce_s - self._clock()
        if wait_s > _WORTH_IT * self._coalesce_s:
            await self._tap.gather(wait_s)
        self._taken_at = self._clock()

    def finished(self) -> None:
        """The finish was taken: decode holds nothing any more."""
        self._handoff.finished()

    async def _elsewhere(self, error: ServiceError) -> Batch:
        """The next tokens from another pair of workers."""
        suspect = "decode"
        while True:
            await self._lives.lost(error, suspect)
            self._handoff = self._lives.begin()
            try:
                return await self._resumed()
            except ServiceError as another:
                error, suspect = another, self._handoff.suspect

    async def _resumed(self) -> Batch:
        """What follows on the newest token, which the new workers give once more unless they replay."""
        handoff, passage = self._handoff, self._lives.passage
        self._ledger.resume(passage.emitted)
        await handoff.start(self._ledger)
        done = await handoff.receipt()
        self._tap = await handoff.generate(passage.settled(done.receipt))
        if not passage.repeats:
            return await self._tap.take()
        known = await self._tap.take(most=1)
        passage.require_newest(known.token_ids)
        if known.finish is not None:
            return Batch(known.first_index + 1, [], finish=known.finish)
        return await self._tap.take()
