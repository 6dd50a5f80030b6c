"""One attempt on one pair of workers: reserve, prefill, generate, give everything back. Chooses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

from fabric import failpoints
from fabric.errors import DeadlineExceeded, Internal, ServiceError, Unavailable
from fabric.telemetry import logs
from protos.deepinfer.v1 import common_pb2, decode_pb2, prefill_pb2
from services.gateway.job import Job, Prompt
from services.gateway.ledger import Ledger
from services.gateway.passage import Passage
from services.gateway.peers import PrefillStream, TokenStream
from services.gateway.tap import Tap
from services.gateway.workers import Chosen

_log = logs.get("handoff")
_CHOSEN = failpoints.declare("gateway.chosen")  # a pair is chosen, nothing was sent to it
_RECEIPT = failpoints.declare("gateway.receipt")  # prefill is done, decode has not heard of it
# A release is tried this long; after it decode's own lease frees the ticket.
_RELEASE_S = 2.0
# Prefill may take this long to end its writes once it is asked to; after it the landing stays in doubt.
_STOP_S = 2.0
_MAX_CLEANUPS = 10_000


class Cleaner:
    """Releases that outlive their request. Owned by the process; `close` waits for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end whatever happens to the caller."""
        if len(self._tasks) >= _MAX_CLEANUPS:
            work.close()  # the lease frees what this would have
            return
        # A fresh context: the request's deadline may be over, this work's is its own.
        task = asyncio.create_task(work, name="release", context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_RELEASE_S)


class Handoff:
    """`start`, `receipt`, then `generate`; `close` at any time releases what is held.

    `attempt_id` is the request's name at the workers: a second attempt must not meet remains of the first.
    `suspect` names the side that was being waited for: where an error came from. `gather_s`: seconds that decode
    may leave between two messages of tokens.
    """

    def __init__(
        self,
        job: Job,
        prompt: Prompt,
        passage: Passage,
        chosen: Chosen,
        cleaner: Cleaner,
        attempt_id: str,
        gather_s: float = 0.0,
    ) -> None:
        self._job, self._prompt, self._passage, self._id = job, prompt, passage, attempt_id
        self._chosen, self._prefill, self._decode, self._cleaner = chosen, chosen.prefill, chosen.decode, cleaner
        self._gather_ms = round(1000 * gather_s)
        self._stream: PrefillStream | None = None
        self._reserving: asyncio.Task[decode_pb2.ReserveResponse] | None = None
        self._ticket: common_pb2.Ticket | None = None
        self._attaching: asyncio.Task[None] | None = None
        self._prefilling: asyncio.Task[prefill_pb2.PrefillDone] | None = None
        self._generating: TokenStream | None = None
        self._opening: asyncio.Task[None] | None = None
        self._tap: Tap | None = None
        self._over = False
        self.suspect = "prefill"
        self.cached_tokens: int | None = None  # by prefill's account, as soon as it gave one

    async def start(self, ledger: Ledger) -> None:
        """Prefill begins while decode reserves; the ticket is attached when it is there."""
        await _CHOSEN.reached()
        stream = self._stream = self._prefill.prefill(self._id)
        self._reserving = asyncio.create_task(self._decode.reserve(self._reserve()))
        await stream.send(prefill_pb2.PrefillRequest(start=self._prefill_start()))
        self.suspect = "decode"
        self._ticket = (await asyncio.shield(self._reserving)).ticket
        self.suspect = "prefill"
        # Tasks of their own: a client that leaves must not cut the call in the middle, since from here on only prefill
        # can tell when it stops to write.
        attach = prefill_pb2.PrefillRequest(attach=prefill_pb2.PrefillAttach(ticket=self._ticket))
        self._attaching = asyncio.create_task(stream.send(attach), name="attach")
        self._prefilling = asyncio.create_task(self._receipt_of(stream, self._attaching), name="prefill")
        await asyncio.shield(self._attaching)
        # What needs no receipt travels while prefill computes.
        self._generating = self._decode.generate(self._id)
        self._tap = Tap(self._generating, ledger, self._prompt.sampling.logprobs is not None)
        self._opening = asyncio.create_task(self._generating.send(self._generate_start()), name="opening")

    async def receipt(self) -> prefill_pb2.PrefillDone:
        """What prefill wrote, once it is done.

        Raises:
            ServiceError: prefill failed, its receipt is for another ticket, or decode is lost meanwhile.
        """
        self.suspect = "prefill"
        if self._prefilling is None or self._tap is None:
            raise RuntimeError("used before start")
        await asyncio.wait((self._prefilling, self._tap.reading), return_when=asyncio.FIRST_COMPLETED)
        if not self._prefilling.done():  # prefill may push to a dead decode for long before it notices
            self.suspect = "decode"
            await self._tap.take()
            raise Internal("decode ended before it had the receipt")
        return self._checked(await self._prefilling)

    async def generate(self, receipt: common_pb2.Receipt) -> Tap:
        """Starts decode, which verifies everything that the receipt names before its first token.

        Raises:
            ServiceError: decode ended the call already.
        """
        self.suspect = "decode"
        if self._generating is None or self._opening is None or self._tap is None:
            raise RuntimeError("used before start")
        await self._opening
        await _RECEIPT.reached()
        await self._generating.send(decode_pb2.DecodeServiceGenerateRequest(receipt=receipt))
        return self._tap

    def finished(self) -> None:
        """Generate ran to its end: decode holds nothing of it any more."""
        self._over = True

    def close(self) -> None:
        """Ends what runs and releases the ticket in the background; safe to repeat."""
        if self._tap is not None:
            self._tap.close()
        if self._generating is not None and self._opening is not None:
            self._generating.cancel()
            self._cleaner.run(_ended(self._opening))
        if self._over:
            return
        self._over = True
        if self._reserving is not None:
            self._cleaner.run(self._release(self._reserving, self._writer()))
        if self._stream is not None and self._prefilling is not None:
            self._cleaner.run(self._stop(self._stream, self._prefilling))
        elif self._stream is not None:
            self._stream.cancel()

    async def _stop(self, stream: PrefillStream, prefilling: asyncio.Task[prefill_pb2.PrefillDone]) -> None:
        """Asks prefill to end and tells decode once it has. A call that is merely cut says nothing about its writes."""
        doubted = self._writer() == decode_pb2.WRITER_STATE_UNKNOWN
        try:
            async with asyncio.timeout(_STOP_S):
                if self._attaching is not None and not prefilling.done():
                    await asyncio.wait((self._attaching,))
                    await stream.send(prefill_pb2.PrefillRequest(cancel=prefill_pb2.PrefillCancel()))
                await asyncio.wait((prefilling,))
        except (ServiceError, TimeoutError) as error:
            _log.info("prefill was not asked to end", error=type(error).__name__, request_id=self._id)
        finally:
            stream.cancel()
            await asyncio.wait((prefilling,))
        if doubted and self._reserving is not None and self._writer() == decode_pb2.WRITER_STATE_FINISHED:
            await self._release(self._reserving, decode_pb2.WRITER_STATE_FINISHED)

    def _writer(self) -> decode_pb2.WriterState:
        """What is known of prefill's writes. After a deadline the rest of a push may still be under way."""
        if self._stream is None or self._prefilling is None:
            return decode_pb2.WRITER_STATE_NEVER_STARTED
        if not self._prefilling.done():
            return decode_pb2.WRITER_STATE_UNKNOWN
        error = self._prefilling.exception()
        over = error is None or (self._stream.told and not isinstance(error, DeadlineExceeded))
        return decode_pb2.WRITER_STATE_FINISHED if over else decode_pb2.WRITER_STATE_UNKNOWN

    async def _release(
        self, reserving: asyncio.Task[decode_pb2.ReserveResponse], writer: decode_pb2.WriterState
    ) -> None:
        """A reservation still under way is awaited: cancelled, its ticket would be held until the lease ends."""
        try:
            async with asyncio.timeout(_RELEASE_S):
                ticket = (await asyncio.shield(reserving)).ticket
                request = decode_pb2.ReleaseRequest(ticket_id=ticket.id, writer=writer, epoch=ticket.epoch)
                await self._decode.release(request, self._id, _RELEASE_S)
        except (ServiceError, TimeoutError) as error:
            _log.info("not released, the lease will", error=type(error).__name__, request_id=self._id)

    def _reserve(self) -> decode_pb2.ReserveRequest:
        chosen = self._chosen
        return decode_pb2.ReserveRequest(
            request_id=self._id,
            token_ids=self._passage.token_ids,
            max_total_tokens=self._prompt.max_total_tokens,
            salt=self._job.salt,
            layout=chosen.layout,
            model_revision=chosen.model_revision,
            use_cache=self._job.use_cache,
            writer=chosen.writer,
            epoch=chosen.decode_epoch,
            scope=self._prompt.scope(self._job),
        )

    def _prefill_start(self) -> prefill_pb2.PrefillStart:
        scope = self._prompt.scope(self._job)
        start = prefill_pb2.PrefillStart(
            request_id=self._id, salt=self._job.salt, use_cache=self._job.use_cache, scope=scope
        )
        self._passage.pack(start)
        return start

    def _generate_start(self) -> decode_pb2.DecodeServiceGenerateRequest:
        start = decode_pb2.DecodeServiceGenerateRequest(
            ticket_id=self._held().id, request_id=self._id, gather_ms=self._gather_ms
        )
        self._passage.pack(start)
        return start

    def _checked(self, done: prefill_pb2.PrefillDone) -> prefill_pb2.PrefillDone:
        ticket = self._held()
        if (done.receipt.ticket_id, done.receipt.epoch) != (ticket.id, ticket.epoch):
            raise Internal("prefill's receipt is for another ticket")
        if done.receipt.WhichOneof("ending") is None:
            raise Internal("prefill's receipt has no ending")
        return done

    async def _receipt_of(self, stream: PrefillStream, attaching: asyncio.Task[None]) -> prefill_pb2.PrefillDone:
        """The end of a prefill call, its ticket attached first."""
        await attaching
        while (message := await stream.receive()) is not None:
            progress = message.WhichOneof("progress")
            if progress == "started":
                self.cached_tokens = message.started.cached_tokens
            elif progress == "done":
                self.cached_tokens = message.done.usage.cached_tokens
                return message.done
        raise Unavailable("prefill ended without a receipt", fix="retry")

    def _held(self) -> common_pb2.Ticket:
        if self._ticket is None:
            raise RuntimeError("used before start")
        return self._ticket


async def _ended(sending: asyncio.Task[None]) -> None:
    """A message that nobody waits for any more; that its call was cancelled is no news."""
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
