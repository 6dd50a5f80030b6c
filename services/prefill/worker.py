"""Worker: the jobs that run now, bounded, and how busy that makes this process."""

from __future__ import annotations

import asyncio

from engine.prefix import Salt
from engine.stats import EngineStats
from fabric.errors import Exhausted, InvalidArgument
from services.prefill.ask import PrefillAsk, TicketGrant
from services.prefill.job import PrefillJob, Report, Tools
from services.prefill.prefetch import Prefetched
from services.prefill.settings import PrefillSettings
from services.worker.status import EngineBoard

_RETRY_S = 0.5


class PrefillWorker:
    """Takes requests up to a bound and runs one job for each."""

    def __init__(self, tools: Tools, settings: PrefillSettings) -> None:
        self._tools = tools
        self._bound = settings.max_waiting + settings.max_sequences
        context = tools.engine.engine.model.max_context_tokens
        self.max_prompt_tokens = min(settings.max_prompt_tokens or context, context - 1)
        self.live = 0
        self.done = 0
        self.board = EngineBoard(tools.engine, self._outside, settings.watch_period_s)

    async def run(self, ask: PrefillAsk, ticket: asyncio.Future[TicketGrant], report: Report) -> None:
        """One request from arrival to receipt.

        Raises:
            Exhausted: as many requests as allowed are here already.
            InvalidArgument: the request can never work. ServiceError: it failed.
        """
        ask.validate(self.max_prompt_tokens)
        if self.unfinished >= self._bound:
            fix = "retry later or on another worker"
            raise Exhausted(f"{self.unfinished} requests are here already", fix=fix, retry_after_s=_RETRY_S)
        self.live += 1
        self.board.poke()
        try:
            await PrefillJob(self._tools, ask, ticket, report).run(position=self.live - 1)
        finally:
            self.live -= 1
            self.done += 1
            self.board.poke()

    @property
    def unfinished(self) -> int:
        """Requests that run, or of which something is still written."""
        return self.live + self._tools.leftovers.pending

    @property
    def finished(self) -> int:
        """Counts up whenever a request ends, or what it left."""
        return self.done + self._tools.leftovers.done

    async def written(self, request_id: str) -> bool:
        """Waits until no write of an ended request is under way, and decode was told so where it can be. False where
        one was given up and may still arrive."""
        return await self._tools.leftovers.over(request_id)

    async def prefetch(self, tokens: tuple[int, ...], salt: Salt) -> Prefetched:
        """Has stores bring up what a request for `tokens` would need.

        Raises:
            InvalidArgument: it is no prompt of this model. Unavailable: the engine does not answer.
        """
        if not 0 < len(tokens) <= self.max_prompt_tokens:
            fix = f"send 1 to {self.max_prompt_tokens}"
            raise InvalidArgument(f"{len(tokens)} tokens", field="token_ids", fix=fix)
        return await self._tools.prefetcher.prefetch(tokens, salt)

    def _outside(self, stats: EngineStats) -> int:
        """Requests that are loading, or already pushed and about to leave. What the engine holds may be left by others
        that ended."""
        return max(0, self.unfinished - stats.waiting - stats.running - stats.held)
