"""The gateway's one use case, whoever asks: identify, admit, answer, measure. Knows no gRPC server and no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from fabric.errors import ServiceError
from fabric.telemetry import logs
from services.gateway.admission import Admission
from services.gateway.flow import Conductor
from services.gateway.intake import Stamp
from services.gateway.job import Finish, Job, Prefetched, Update
from services.gateway.meters import Meters
from services.gateway.tenants import Tenant, Tenants

_log = logs.get("gateway")


@dataclass(slots=True)
class _Trace:
    """Times and counts of one request; never its content."""

    started: float
    last: float
    first_token_s: float | None = None
    finish: Finish | None = None
    code: str = "ok"


class Front:
    """Answers jobs. `new_id` mints request ids, `now` gives unix seconds, `clock` monotonic ones."""

    def __init__(
        self,
        tenants: Tenants,
        admission: Admission,
        conductor: Conductor,
        meters: Meters,
        new_id: Callable[[], str],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tenants = tenants
        self._admission, self._conductor, self._meters = admission, conductor, meters
        self._new_id, self._now, self._clock = new_id, now, clock
        self.steps = 0

    def stamp(self, tenant: Tenant, prefix: str = "") -> Stamp:
        """What a request of this tenant carries from here on."""
        return Stamp(prefix + self._new_id(), tenant, int(self._now()))

    @asynccontextmanager
    async def answer(self, tenant: Tenant, job: Job, surface: str) -> AsyncIterator[AsyncIterator[Update]]:
        """The job's updates, the first one ready. Leaving the context frees everything.

        Raises:
            ServiceError: refused, or failed before the first token.
        """
        with self._traced(job, surface) as trace:
            async with self._admission.admit(tenant.name), self._conductor.answer(job) as updates:
                yield self._observed(updates, surface, trace)

    async def prefetch(self, tenant: Tenant, job: Job, surface: str) -> Prefetched:
        """Has what is kept of the job's prompt brought to memory, before the job itself comes.

        Raises:
            ServiceError: refused, or the job could not be answered either.
        """
        with self._traced(job, surface):
            async with self._admission.admit(tenant.name):
                return await self._conductor.prefetch(job)

    @contextmanager
    def _traced(self, job: Job, surface: str) -> Iterator[_Trace]:
        now = self._clock()
        trace = _Trace(now, now)
        try:
            yield trace
        except ServiceError as error:
            trace.code = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            trace.code = "cancelled"
            raise
        except BaseException:
            trace.code = "internal"
            raise
        finally:
            self.steps += 1
            self._close(job, surface, trace)

    async def _observed(self, updates: AsyncIterator[Update], surface: str, trace: _Trace) -> AsyncIterator[Update]:
        async for update in updates:
            now = self._clock()
            self.steps += 1
            if trace.first_token_s is None:
                trace.first_token_s = now - trace.started
                self._meters.first_token(surface, trace.first_token_s)
            else:
                self._meters.tokens(surface, len(update.batch.token_ids), now - trace.last)
            trace.last = now
            if update.finish is not None:
                trace.finish = update.finish
                self._meters.finished(update.finish)
            yield update

    def _close(self, job: Job, surface: str, trace: _Trace) -> None:
        elapsed_s = self._clock() - trace.started
        self._meters.ended(surface, trace.code, elapsed_s)
        usage = trace.finish.usage if trace.finish is not None else None
        _log.info(
            "request",
            request_id=job.request_id,
            surface=surface,
            code=trace.code,
            ms=round(elapsed_s * 1000, 3),
            first_token_ms=None if trace.first_token_s is None else round(trace.first_token_s * 1000, 3),
            prompt_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
        )
