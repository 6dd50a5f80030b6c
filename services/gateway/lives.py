"""Lives: one request's pairs of workers, one after the other. Knows who failed it; tells no tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from fabric import deadline
from fabric.errors import Exhausted, ServiceError, Unavailable
from fabric.telemetry import logs
from services.gateway.handoff import Cleaner, Handoff
from services.gateway.job import Job, Prompt
from services.gateway.passage import Passage
from services.gateway.recovery import Recovery
from services.gateway.router import Demand
from services.gateway.workers import Chosen, Workers

_log = logs.get("lives")

# Told of every lost life or recipe: when it was lost, the error's code, whether another one follows.
Observe = Callable[[str, str, bool], None]


class Lives:
    """`begin`, and `lost` each time that fails; `close` frees what the last one holds."""

    def __init__(
        self,
        job: Job,
        prompt: Prompt,
        workers: Workers,
        cleaner: Cleaner,
        recovery: Recovery,
        observe: Observe,
        gather_s: float = 0.0,
    ) -> None:
        self._job, self._prompt, self._workers, self._cleaner = job, prompt, workers, cleaner
        self._recovery, self._observe, self._gather_s = recovery, observe, gather_s
        self.passage = Passage(prompt)
        self._failed: set[str] = set()
        self._full: str = ""
        self._number = 0
        self._chosen: Chosen | None = None
        self._handoff: Handoff | None = None
        self._cached_tokens: int | None = None
        self._held = ExitStack()

    def begin(self) -> Handoff:
        """A handoff to a pair without those that failed, or with them where nobody else is there.

        Raises:
            Unavailable: nobody can take the request.
        """
        chosen = self._chosen = self._choose()
        self.passage.to(chosen.replays)
        attempt_id = f"{self._job.request_id}.{self._number}" if self._number else self._job.request_id
        self._number += 1
        handoff = self._handoff = Handoff(
            self._job, self._prompt, self.passage, chosen, self._cleaner, attempt_id, self._gather_s
        )
        self._held.callback(chosen.settle)
        self._held.callback(handoff.close)
        return handoff

    @property
    def cached_tokens(self) -> int | None:
        """By the first account that a prefill gave: a later one finds what this request itself had computed before."""
        if self._cached_tokens is not None or self._handoff is None:
            return self._cached_tokens
        return self._handoff.cached_tokens

    async def lost(self, error: ServiceError, suspect: str) -> None:
        """Frees the life that `error` of the `suspect` side ended, and waits until another may begin.

        Raises:
            ServiceError: `error`, where none may.
        """
        self._cached_tokens = self.cached_tokens
        self.close()
        begun = self.passage.begun
        pause_s = self._recovery.pause_s(error, begun, deadline.remaining_s())
        when = "streaming" if begun else "opening"
        self._observe(when, error.code, pause_s is not None)
        key = self._chosen.key_of(suspect) if self._chosen is not None else ""
        _log.info(
            "workers failed", request_id=self._job.request_id, when=when, worker=key, error=error.code, pause_s=pause_s
        )
        if pause_s is None:
            raise error
        self._full = key if isinstance(error, Exhausted) else ""
        if not self._full:
            self._failed.add(key)
        await asyncio.sleep(pause_s)

    def close(self) -> None:
        """Ends the present life; safe to repeat."""
        self._held.close()

    def _choose(self) -> Chosen:
        prompt, job = self._prompt, self._job
        demand = Demand(job.model, self.passage.token_ids, prompt.max_total_tokens, prompt.salt(job), job.use_cache)
        for excluded in ({*self._failed, self._full}, self._failed):
            try:
                return self._workers.choose(demand, frozenset(excluded - {""}))
            except Unavailable:
                continue
        return self._workers.choose(demand, frozenset())
