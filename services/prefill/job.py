"""Job: one request's life in a prefill worker, from arrival to receipt. Owns the order of things; computes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial

from engine.errors import EngineError, UnknownRequest
from engine.events import ChunkDone, EntriesReady, Event, Failed, Finished, FirstToken, Preempted
from engine.runner import EngineRunner
from engine.sampling.logprobs import TokenLogprob
from fabric import failpoints
from fabric.errors import Cancelled, DeadlineExceeded, Internal
from fabric.kvlink.leftovers import Leftovers
from fabric.kvlink.outgoing import Sender
from fabric.records import Extent
from services.prefill.ask import PrefillAsk, TicketGrant
from services.prefill.load import Loader
from services.prefill.marks import Marks
from services.prefill.prefetch import Prefetcher
from services.prefill.push import PoolSource, Pusher
from services.prefill.telemetry import PrefillMetrics
from services.prefill.telling import Telling
from services.worker.failures import engine_errors, translate
from services.worker.receipts import Receipt
from services.worker.together import together

_LOADING = failpoints.declare("prefill.queued")  # a request was taken, nothing is loaded or computed
_CHUNK = failpoints.declare("prefill.chunk")  # a chunk was computed, the pusher has not heard of it
_PUSHED = failpoints.declare("prefill.pushed")  # everything was written, the receipt has not left


@dataclass(frozen=True, slots=True)
class Queued:
    position: int


@dataclass(frozen=True, slots=True)
class Started:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Computed:
    computed_tokens: int
    pushed_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    receipt: Receipt
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...]


Progress = Queued | Started | Computed | Done
Report = Callable[[Progress], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Tools:
    """What every job of a worker uses. `leftovers`, by request: what goes on when a job is over."""

    engine: EngineRunner
    sender: Sender
    leftovers: Leftovers
    source: PoolSource
    loader: Loader
    prefetcher: Prefetcher
    heartbeat_s: float
    ticket_wait_s: float
    metrics: PrefillMetrics


class PrefillJob:
    """Runs once. However it ends, the engine computes nothing of it afterwards, and holds nothing but what it offers to
    the kvstore and, until its end, what is still written."""

    def __init__(self, tools: Tools, ask: PrefillAsk, ticket: asyncio.Future[TicketGrant], report: Report) -> None:
        self._tools, self._ask, self._ticket = tools, ask, ticket
        self._telling: Telling[Progress] = Telling(report)
        self._marks = Marks()
        self._pusher: Pusher | None = None
        self._submitted = False  # from then on the engine holds something

    async def run(self, position: int) -> None:
        """Queue, load, compute and push at once, receipt. Raises ServiceError."""
        self._telling.tell(Queued(position))
        try:
            await self._answered()
        finally:
            self._say_that_writing_is_over()
            await self._telling.close()

    async def _answered(self) -> None:
        """The pusher is there from the first moment: its signs of life keep the ticket while nothing is computed."""
        try:
            (ticket, extents), first = await together(self._push(), self._compute())
            await _PUSHED.reached()
            await self._telling.finish(self._done(ticket, extents, first))
        except EngineError as error:
            raise translate(error) from error
        finally:
            if self._submitted:
                self._give_back()

    async def _compute(self) -> FirstToken | EntriesReady:
        """Loads, then follows the engine to the first token, or to the last entry where decode replays and draws it."""
        await _LOADING.reached()
        await self._tools.loader.load(self._ask)
        with engine_errors():
            await self._tools.engine.submit(self._ask.request())
        self._submitted = True
        async with aclosing(self._tools.engine.events(self._ask.request_id, keep=True)) as events:
            return await self._followed(events)

    async def _followed(self, events: AsyncIterator[Event]) -> FirstToken | EntriesReady:
        started = False
        async for event in events:
            match event:
                case ChunkDone():
                    await _CHUNK.reached()
                    self._marks.computed(event.computed_tokens)
                    if not started:
                        self._telling.tell(Started(self._cached_tokens()))
                    started = True
                    pushed = self._pusher.pushed_tokens if self._pusher else 0
                    self._telling.tell(Computed(event.computed_tokens, pushed))
                case Preempted():
                    self._marks.lost()
                case FirstToken():
                    self._marks.completed()
                    return event
                case EntriesReady():
                    self._marks.completed(windows=False)
                    return event
                case Failed():
                    raise translate(event.error)
                case Finished():
                    raise Cancelled("the request was cancelled")
        raise Internal("the engine ended a prefill early")

    async def _push(self) -> tuple[TicketGrant, tuple[Extent, ...]]:
        """Waits for the ticket, then pushes what is final until everything is."""
        tools = self._tools
        ticket = await self._awaited_ticket()
        handoff = ticket.handoff(self._ask, tools.engine.engine.model)
        request_id = self._ask.request_id
        held = lambda: tools.engine.engine.held(request_id)  # noqa: E731
        leave = partial(tools.leftovers.keep, request_id)
        self._pusher = Pusher(
            tools.sender, tools.source, ticket, handoff, held, tools.heartbeat_s, tools.metrics, leave
        )
        return ticket, await self._pusher.run(self._marks)

    async def _awaited_ticket(self) -> TicketGrant:
        try:
            async with asyncio.timeout(self._tools.ticket_wait_s):
                return await asyncio.shield(self._ticket)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no ticket came within {self._tools.ticket_wait_s} s", fix="attach the ticket that Reserve returned"
            ) from error

    def _done(self, ticket: TicketGrant, extents: tuple[Extent, ...], first: FirstToken | EntriesReady) -> Done:
        model, ask = self._tools.engine.engine.model, self._ask
        drawn = first if isinstance(first, FirstToken) else None
        receipt = Receipt(
            ticket_id=ticket.id,
            request_id=ask.request_id,
            epoch=ticket.epoch,
            model_revision=model.revision,
            layout_fingerprint=model.layout.fingerprint,
            tokens=len(ask.tokens),
            extents=extents,
            first_token=drawn.token if drawn else None,
            state=first.state,
            logprob=drawn.logprob if drawn else None,
            replay_from=None if drawn else model.layout.replay.start(len(ask.tokens)),
        )
        logprobs = tuple(logprob for logprob in (drawn.prompt_logprobs if drawn else None) or () if logprob is not None)
        return Done(receipt, ask.prompt_tokens, min(first.cached_tokens, ask.prompt_tokens), logprobs)

    def _cached_tokens(self) -> int:
        """Read beside the engine's thread: set once, at admission; asking the thread would wait for a whole step."""
        engine, layout = self._tools.engine.engine, self._tools.engine.engine.model.layout
        found = 0
        with suppress(UnknownRequest):  # it has failed since: the event that says why is on its way
            found = engine.sealed(self._ask.request_id).cached_blocks * layout.block_tokens
        return min(layout.replay.start(found), self._ask.prompt_tokens)

    def _say_that_writing_is_over(self) -> None:
        """However early the end: whoever holds a landing for this request learns of it. A pusher says it itself."""
        ticket = self._ticket
        came = ticket.done() and not ticket.cancelled() and ticket.exception() is None
        if self._pusher is None and came:
            self._tools.leftovers.keep(self._ask.request_id, self._tools.sender.give_up(ticket.result().landing))

    def _give_back(self) -> None:
        """The one exit from the engine. Nothing is computed from now on; the blocks go when nothing reads them any
        more: now, unless a write is under way."""
        engine, request_id = self._tools.engine, self._ask.request_id
        engine.hold(request_id)
        self._tools.leftovers.after(request_id, partial(engine.release, request_id))
