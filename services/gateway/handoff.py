"""One attempt on one pair of workers: reserve, prefill, generate, give everything back. Chooses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any

from fabric.errors import Internal, ServiceError, Unavailable
from fabric.telemetry import logs
from protos.deepinfer.v1 import common_pb2, decode_pb2, prefill_pb2
from services.gateway import sampling
from services.gateway.job import Job, Prompt
from services.gateway.ledger import Ledger
from services.gateway.peers import Decode, Prefill, PrefillStream
from services.gateway.tap import Tap

_log = logs.get("handoff")
# A release is tried this long; after it decode's own lease frees the ticket.
_RELEASE_S = 2.0
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
    `suspect` names the side that was being waited for: where an error came from.
    """

    def __init__(
        self, job: Job, prompt: Prompt, prefill: Prefill, decode: Decode, cleaner: Cleaner, attempt_id: str
    ) -> None:
        self._job, self._prompt, self._id = job, prompt, attempt_id
        self._prefill, self._decode, self._cleaner = prefill, decode, cleaner
        self._sampling = sampling.pack(prompt.sampling)
        self._stream: PrefillStream | None = None
        self._reserving: asyncio.Task[decode_pb2.ReserveResponse] | None = None
        self._ticket: common_pb2.Ticket | None = None
        self._writer: decode_pb2.WriterState = decode_pb2.WRITER_STATE_NEVER_STARTED
        self._tap: Tap | None = None
        self._over = False
        self.suspect = "prefill"

    async def start(self, layout_fingerprint: str, model_revision: str) -> None:
        """Prefill begins while decode reserves; the ticket is attached when it is there."""
        self._reserving = asyncio.create_task(self._decode.reserve(self._reserve(layout_fingerprint, model_revision)))
        stream = self._stream = self._prefill.prefill(self._id)
        await stream.send(prefill_pb2.PrefillRequest(start=self._prefill_start()))
        self.suspect = "decode"
        self._ticket = (await asyncio.shield(self._reserving)).ticket
        self.suspect = "prefill"
        # From here on prefill may write whatever becomes of its call.
        self._writer = decode_pb2.WRITER_STATE_UNKNOWN
        await stream.send(prefill_pb2.PrefillRequest(attach=prefill_pb2.PrefillAttach(ticket=self._ticket)))
        await stream.done()

    async def receipt(self) -> prefill_pb2.PrefillDone:
        """What prefill wrote, once it is done.

        Raises:
            ServiceError: prefill failed, or its receipt is for another ticket.
        """
        self.suspect = "prefill"
        while self._stream is not None and (message := await self._stream.receive()) is not None:
            if message.WhichOneof("progress") == "done":
                self._writer = decode_pb2.WRITER_STATE_FINISHED
                return self._checked(message.done)
        raise Unavailable("prefill ended without a receipt", fix="retry")

    def generate(self, receipt: common_pb2.Receipt, ledger: Ledger) -> Tap:
        """Starts decode, which verifies everything that the receipt names before its first token."""
        self.suspect = "decode"
        stream = self._decode.generate(
            decode_pb2.DecodeServiceGenerateRequest(
                ticket_id=self._held().id,
                request_id=self._id,
                token_ids=self._prompt.token_ids,
                sampling=self._sampling,
                receipt=receipt,
            )
        )
        self._tap = Tap(stream, ledger, self._prompt.sampling.logprobs is not None)
        return self._tap

    def finished(self) -> None:
        """Generate ran to its end: decode holds nothing of it any more."""
        self._over = True

    def close(self) -> None:
        """Cancels what runs and releases the ticket in the background; safe to repeat."""
        if self._tap is not None:
            self._tap.close()
        if self._over:
            return
        self._over = True
        if self._stream is not None:
            self._stream.cancel()
        if self._reserving is not None:
            self._cleaner.run(self._release(self._reserving, self._writer))

    async def _release(
        self, reserving: asyncio.Task[decode_pb2.ReserveResponse], writer: decode_pb2.WriterState
    ) -> None:
        """A reservation still under way is awaited: cancelled, its ticket would be held until the lease ends."""
        try:
            async with asyncio.timeout(_RELEASE_S):
                ticket_id = (await reserving).ticket.id
                request = decode_pb2.ReleaseRequest(ticket_id=ticket_id, writer=writer)
                await self._decode.release(request, self._id, _RELEASE_S)
        except (ServiceError, TimeoutError) as error:
            _log.info("not released, the lease will", error=type(error).__name__, request_id=self._id)

    def _reserve(self, layout_fingerprint: str, model_revision: str) -> decode_pb2.ReserveRequest:
        return decode_pb2.ReserveRequest(
            request_id=self._id,
            token_ids=self._prompt.token_ids,
            max_total_tokens=self._prompt.max_total_tokens,
            salt=self._job.salt,
            layout_fingerprint=layout_fingerprint,
            model_revision=model_revision,
            use_cache=self._job.use_cache,
        )

    def _prefill_start(self) -> prefill_pb2.PrefillStart:
        return prefill_pb2.PrefillStart(
            request_id=self._id,
            token_ids=self._prompt.token_ids,
            sampling=self._sampling,
            salt=self._job.salt,
            use_cache=self._job.use_cache,
        )

    def _checked(self, done: prefill_pb2.PrefillDone) -> prefill_pb2.PrefillDone:
        ticket = self._held()
        if (done.receipt.ticket_id, done.receipt.epoch) != (ticket.id, ticket.epoch):
            raise Internal("prefill's receipt is for another ticket")
        if done.receipt.WhichOneof("ending") != "first_token":
            raise Internal("prefill's receipt has no first token")
        return done

    def _held(self) -> common_pb2.Ticket:
        if self._ticket is None:
            raise RuntimeError("used before start")
        return self._ticket
