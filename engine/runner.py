"""Runner: the thread that owns an engine, and its asyncio face. Knows nothing of what the engine computes.

Every call crosses to the engine thread between two steps. A reader that falls behind pauses its own request only. When
the thread dies, every request and every call fails with EngineStopped and `healthy` turns false.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.engine import Engine
from engine.errors import CallTimeout, DuplicateRequest, EngineStopped, Exhausted, IntegrityBroken, UnknownRequest
from engine.events import Event, Failed, is_last
from engine.mailbox import Mailbox
from engine.offers import Offer
from engine.prefix import Salt
from engine.requests import DecodeRequest, GenerateRequest, Load, PrefillRequest, Reservation

Result = TypeVar("Result")
_IDLE_S = 0.05  # how long a blocked engine waits before it looks again by itself
_SLEEP_S = 1.0
_MAX_UNDELIVERED = 64  # steps whose events the event loop has not taken yet


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Bounds of the crossing between event loop and engine thread."""

    calls: int = 1024  # calls waiting for the engine thread
    events: int = 256  # unread events of one request before it is paused
    call_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step that went through the model: how long it took, and for how many tokens."""

    seconds: float
    tokens: int


@dataclass(slots=True)
class _Call:
    function: Callable[[], Any]
    future: asyncio.Future[Any] | None  # None: nobody waits, and it must not raise


class EngineRunner:
    """Create it on the event loop that will use it; `close` it there."""

    def __init__(
        self, engine: Engine, limits: RunnerLimits = RunnerLimits(), observe: Callable[[Step], None] | None = None
    ) -> None:
        """`observe` is told of every step that computed something; it runs on the engine thread and must be quick."""
        self.engine, self._limits, self._observe = engine, limits, observe
        self.steps = 0  # moves while work is pending, unless the engine is stuck
        self.busy = False  # whether work is pending: then `steps` must move
        self.fatal: BaseException | None = None
        self.on_offer: Callable[[], None] = lambda: None  # called on the event loop after an offer was made
        self._loop = asyncio.get_running_loop()
        self._calls: deque[_Call] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._undelivered = threading.Semaphore(_MAX_UNDELIVERED)
        self._mailboxes: dict[str, Mailbox] = {}
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the engine thread is alive and taking work."""
        return self.fatal is None and not self._closing

    async def call(self, function: Callable[..., Result], *args: Any, timeout_s: float | None = None) -> Result:
        """Run `function(*args)` on the engine thread between two steps.

        Raises what it raises, Exhausted if too many calls wait, EngineStopped, or CallTimeout at the deadline: a call
        that had not started by then never runs.
        """
        future = self._post(function, *args)
        deadline_s = self._limits.call_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                result: Result = await future
                return result
        except TimeoutError as error:
            raise CallTimeout(f"the engine did not answer within {deadline_s} s", fix="look at its load") from error

    async def submit(
        self, request: GenerateRequest | PrefillRequest, timeout_s: float | None = None, gather_s: float = 0.0
    ) -> None:
        """Queue a request; read it with `events`: tokens in portions, about `gather_s` seconds apart.

        Raises what `Engine.submit` and `call` raise.
        """
        prefill = isinstance(request, PrefillRequest)
        submit = self.engine.submit_prefill if prefill else self.engine.submit
        await self._begin(request.request_id, submit, request, timeout_s, gather_s)

    async def reserve(
        self,
        request_id: str,
        prompt_tokens: int,
        max_total_tokens: int,
        salt: Salt = b"",
        prompt: tuple[int, ...] | None = None,
        timeout_s: float | None = None,
    ) -> Reservation:
        """`Engine.reserve`. A reservation whose caller gave up waiting is released."""
        args = (request_id, prompt_tokens, max_total_tokens, salt, prompt)
        return await self._acquire(
            lambda: self.engine.reserve(*args), lambda taken: self.engine.release(taken.request_id), timeout_s
        )

    async def begin_load(
        self, prompt: tuple[int, ...], salt: Salt, from_block: int, to_block: int, timeout_s: float | None = None
    ) -> Load:
        """`Engine.begin_load`. A load whose caller gave up waiting is abandoned."""
        args = (prompt, salt, from_block, to_block)
        return await self._acquire(lambda: self.engine.begin_load(*args), self.engine.abandon_load, timeout_s)

    async def take_offer(self, timeout_s: float | None = None) -> Offer | None:
        """`Offers.take`: pair it with `drop_offer`. One whose taker gave up waiting is dropped."""

        def give_back(offer: Offer | None) -> None:
            if offer is not None:
                self.engine.offers.drop(offer.offer_id)

        return await self._acquire(self.engine.offers.take, give_back, timeout_s)

    def drop_offer(self, offer_id: int) -> None:
        """Let go of an offer; never blocks, never raises, may be repeated."""
        self._post_quietly(lambda: self.engine.offers.drop(offer_id))

    async def start_decode(self, request: DecodeRequest, timeout_s: float | None = None, gather_s: float = 0.0) -> None:
        """`Engine.start_decode`; read it with `events`, as after `submit`."""
        await self._begin(request.request_id, self.engine.start_decode, request, timeout_s, gather_s)

    async def events(self, request_id: str, keep: bool = False) -> AsyncGenerator[Event, None]:
        """Events of a submitted request up to its last. Raises UnknownRequest. Leaving early cancels the request; with
        `keep` it ends its computing alone: what it holds stays until `release`.

        Whoever submits reads to the end, or calls `release`. Token events come joined when the reader was slow.
        """
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None:
            raise UnknownRequest(request_id)
        ended = False
        try:
            while not ended:
                event = await mailbox.get()
                ended = is_last(event)
                self._resume(request_id, mailbox)
                yield event
        finally:
            if self._mailboxes.get(request_id) is mailbox:
                del self._mailboxes[request_id]
            if not ended:
                (self.hold if keep else self.cancel)(request_id)

    @asynccontextmanager
    async def running(
        self, request: GenerateRequest | PrefillRequest | DecodeRequest, gather_s: float = 0.0
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """Start a request, give its events, and leave nothing of it behind however the block ends."""
        if isinstance(request, DecodeRequest):
            await self.start_decode(request, gather_s=gather_s)
        else:
            await self.submit(request, gather_s=gather_s)
        events = self.events(request.request_id)
        try:
            yield events
        finally:
            await events.aclose()
            self.release(request.request_id)

    def cancel(self, request_id: str) -> None:
        """End a request before the next step; never blocks, never raises, may be repeated."""
        self._post_quietly(lambda: self.engine.cancel(request_id))

    def hold(self, request_id: str) -> None:
        """Compute no more of a request from the next step on; never blocks, never raises, may be repeated."""
        self._post_quietly(lambda: self.engine.hold(request_id))

    def abandon_load(self, load: Load) -> None:
        """Give a load's memory back unless it ended; never blocks, never raises, may be repeated."""
        self._post_quietly(lambda: self.engine.abandon_load(load))

    def release(self, request_id: str) -> None:
        """Free what a request or reservation holds; never blocks, never raises, may be repeated."""
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            mailbox.put(Failed(request_id, UnknownRequest(request_id)))  # a reader must not wait for ever
        self._post_quietly(lambda: self.engine.release(request_id))

    async def close(self, timeout_s: float = 30.0) -> None:
        """Stop after the current step and fail whatever is left. Idempotent. Raises CallTimeout if it does not end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            raise CallTimeout(f"the engine's step did not end within {timeout_s} s")

    # --- event loop side -------------------------------------------------------------------------------------------

    async def _begin(
        self, request_id: str, start: Callable[[Any], None], request: Any, timeout_s: float | None, gather_s: float
    ) -> None:
        if request_id in self._mailboxes:
            raise DuplicateRequest(request_id)
        self._mailboxes[request_id] = Mailbox(self._limits.events, gather_s)
        try:
            await self.call(start, request, timeout_s=timeout_s)
        except BaseException as error:
            del self._mailboxes[request_id]
            if isinstance(error, CallTimeout | asyncio.CancelledError):
                self.cancel(request_id)
            raise

    async def _acquire(
        self, acquire: Callable[[], Result], give_back: Callable[[Result], None], timeout_s: float | None
    ) -> Result:
        """`call` for what takes memory: if its result can no longer be handed over, it is given back."""
        taken: list[Result] = []

        def run() -> Result:
            taken.append(acquire())
            return taken[0]

        try:
            return await self.call(run, timeout_s=timeout_s)
        except (CallTimeout, asyncio.CancelledError):
            self._post_quietly(lambda: give_back(taken[0]) if taken else None)
            raise

    def _post(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._wake:
            if not self.healthy:
                raise self._stopped()
            if len(self._calls) >= self._limits.calls:
                raise Exhausted("engine calls", needed=1, free=0)
            self._calls.append(_Call(lambda: function(*args), future))
            self._wake.notify()
        return future

    def _post_quietly(self, function: Callable[[], Any]) -> None:
        with self._wake:
            self._calls.append(_Call(function, None))
            self._wake.notify()

    def _deliver(self, events: list[Event]) -> None:
        self._undelivered.release()
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:
                mailbox.put(event)
                if mailbox.full and not mailbox.paused:
                    self._pause(event.request_id, mailbox, True)

    def _resume(self, request_id: str, mailbox: Mailbox) -> None:
        if mailbox.paused and mailbox.drained:
            self._pause(request_id, mailbox, False)

    def _pause(self, request_id: str, mailbox: Mailbox, paused: bool) -> None:
        mailbox.paused = paused
        self._post_quietly(lambda: self.engine.pause(request_id, paused))

    def _fail_all(self) -> None:
        error = self._stopped()
        for request_id, mailbox in self._mailboxes.items():
            if not mailbox.ended:
                mailbox.put(Failed(request_id, error))
        for call in self._calls:
            if call.future is not None and not call.future.done():
                call.future.set_exception(error)
        self._calls.clear()

    def _stopped(self) -> EngineStopped:
        error = EngineStopped(f"the engine stopped: {self.fatal!r}" if self.fatal else "the engine is closed")
        error.__cause__ = self.fatal
        return error

    # --- engine thread side ----------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:  # reported through `fatal` to every request, every call and the health check
            self.fatal = error
        with suppress(RuntimeError):  # the event loop is gone, and with it everybody who could listen
            self._loop.call_soon_threadsafe(self._fail_all)

    def _turn(self) -> None:
        with self._wake:
            if not self._calls and not self._closing and (self.engine.blocked or not self.engine.has_work):
                self._wake.wait(_IDLE_S if self.engine.has_work else None)
            calls = [self._calls.popleft() for _ in range(len(self._calls))]
        for call in calls:
            self._answer(call)
        self.busy = self.engine.has_work
        if self.busy and not self._closing:
            self._send(self._step())
        self.busy = self.engine.has_work
        if self.engine.offers.has_news and not self._closing:
            self.engine.offers.has_news = False
            self._loop.call_soon_threadsafe(self._tell_of_offers)

    def _tell_of_offers(self) -> None:
        self.on_offer()

    def _step(self) -> list[Event]:
        began = time.monotonic()
        events = self.engine.step()
        self.steps += 1
        if self._observe is not None and self.engine.batch_tokens:
            self._observe(Step(time.monotonic() - began, self.engine.batch_tokens))
        return events

    def _answer(self, call: _Call) -> None:
        if call.future is None:
            call.function()
        elif not call.future.cancelled():
            try:
                result = call.function()
            except IntegrityBroken:
                self._loop.call_soon_threadsafe(_fail, call.future, EngineStopped("the engine's accounts are broken"))
                raise
            except Exception as error:  # belongs to the caller, whatever it is
                self._loop.call_soon_threadsafe(_fail, call.future, error)
            else:
                self._loop.call_soon_threadsafe(_resolve, call.future, result)

    def _send(self, events: list[Event]) -> None:
        """Hand events to the loop. A loop that takes none stops the engine: nobody could be served anyway."""
        while events and not self._closing:
            if self._undelivered.acquire(timeout=_SLEEP_S):
                self._loop.call_soon_threadsafe(self._deliver, events)
                return


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
