"""The receiving half of pipelined transfers: each chunk is verified into live memory and its credit returned.

Knows landings and digests; where an extent belongs is told by the caller's `place`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager

from fabric.errors import Cancelled, DataLoss, DeadlineExceeded, Internal, InvalidArgument, ServiceError, Unavailable
from fabric.kvlink import messages
from fabric.kvlink.answers import Answers, Peer, Transfer, Verified
from fabric.kvlink.credit import ReceiveRing
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Bytes, Link, Notice
from fabric.kvlink.messages import Chunk, Credit, FromSender, GaveUp, Trailing, Word, word_of
from fabric.kvlink.placing import Place, PlaceAll, check_chunk, rows_of
from fabric.kvlink.slabs import SlabState, Writer
from fabric.kvlink.verify import CopyRows, parts
from fabric.records import Landing, LinkAddress
from fabric.telemetry import logs

_log = logs.get("kvlink")
_MAX_EARLY_ROWS = 1 << 16  # of a transfer; each takes some 300 bytes until its turn
_LENT_BYTES = 256 << 20  # that a writer may announce ahead: a receiver keeps nothing but the table of what it names
# Told of every message of the writer of a transfer, also after the transfer was closed while its writer is in doubt.
Heard = Callable[[str, Peer, Word], None]


class Intake:
    """All pipelined transfers into one landing pool. Feed it the link's notices; it runs in the link's event loop.

    Args:
        heard: told what writers say.
        commits: chunks that are copied at a time, over all transfers; they take turns in order of arrival.
        credit_timeout_s: seconds after which a credit that cannot be delivered is dropped.
    """

    def __init__(
        self,
        link: Link,
        pool: LandingPool,
        heard: Heard = lambda owner, writer, word: None,
        commits: int = 2,
        credit_timeout_s: float = 5.0,
    ) -> None:
        self._link, self._pool, self._heard = link, pool, heard
        self._commits = asyncio.Semaphore(commits)
        self._spent = 0  # bytes copied at once in this turn of the event loop
        self._open: dict[str, Transfer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers = Answers(link, credit_timeout_s, self._spawn)
        self._in_doubt: dict[str, Peer | None] = {}

    def open(
        self,
        owner: str,
        window_bytes: int,
        place: Place,
        writer: Peer | None = None,
        place_all: PlaceAll | None = None,
    ) -> Landing:
        """Grants a ring of `window_bytes` bytes, at least the largest extent and better 4 chunks, to one writer.

        Chunks are verified into what `place` names as they arrive. `owner` becomes the landing's id and must be new.
        Only `writer` is listened to; where it is None, the first one to say something. `place_all` spares a call for
        each extent where a kernel copies them.

        Raises:
            InvalidArgument: more than the pool has, or `owner` holds a landing already.
            Exhausted: no room now.
        """
        landing = self._pool.grant(owner, window_bytes, max(_LENT_BYTES, window_bytes))
        self._open[owner] = Transfer(
            landing, place, place_all, ReceiveRing(window_bytes), writer=writer, told=Credit(owner, 0, 0)
        )
        return landing

    def noticed(self, notice: Notice) -> bool:
        """Takes what a sender says; False for a notice that is not of this protocol."""
        if not messages.is_for_receiver(notice.payload):
            return False
        try:
            message = messages.unpack(notice.payload)
            if isinstance(message, FromSender):
                self._told((notice.peer, notice.epoch), message)
        except InvalidArgument as error:
            _log.warning("notice dropped", peer=notice.peer, reason=error.message)
        except Exception as error:  # no notice may end the one consumer of all of them
            _log.error("notice not taken", error=type(error).__name__, frames=logs.frames(error))
        return True

    async def ready(self, owner: str, timeout_s: float) -> Verified:
        """Waits until the last chunk is verified; returns every extent as the writer sealed it, in order of arrival,
        the newest of each (group, block): compare it with the receipt.

        Raises:
            InvalidArgument: no such transfer, or its writer broke the protocol.
            DataLoss: bytes are not what their digest says. What was placed must not be used.
            Cancelled: the writer gave up.
            DeadlineExceeded: not complete in time; it goes on.
        """
        transfer = self._find(owner)
        try:
            # Somebody waits now: a link that polls looks at once, and often again.
            async with asyncio.timeout(timeout_s):
                with self._link.expecting():
                    await transfer.over.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{owner} is not complete after {timeout_s:.3g} s") from error
        if transfer.error is not None:
            raise transfer.error
        return transfer.verified

    def stop(self, owner: str, writer: Writer) -> asyncio.Task[None] | None:
        """Ends a transfer, complete or not; safe to repeat. Once the task that is returned is done, or at once where
        there is none, nothing is copied to its places any more.

        `writer` is what is known of a writer that has not said that it is done. A later call with better news frees
        what was in doubt.
        """
        transfer = self._open.pop(owner, None)
        if transfer is not None:
            self._answers.remember(transfer)
            self._fail(transfer, Cancelled(f"{owner} was closed"))
        self._pool.release(owner, writer)
        if transfer is not None and self._pool.state(owner) is not SlabState.FREE:
            self._in_doubt[owner] = transfer.writer
        self._forget_what_is_free()
        return transfer.committing if transfer is not None else None

    async def close(self, owner: str, writer: Writer) -> None:
        """As `stop`, and waits until nothing is copied any more."""
        copying = self.stop(owner, writer)
        if copying is not None:
            await asyncio.wait([copying])

    async def aclose(self) -> None:
        """Ends everything; for the end of the process, before the link closes."""
        for owner in list(self._open):
            await self.close(owner, Writer.UNKNOWN)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _find(self, owner: str) -> Transfer:
        transfer = self._open.get(owner)
        if transfer is None:
            raise InvalidArgument(f"{owner} is no open transfer", field="landing")
        return transfer

    def _told(self, writer: Peer, message: FromSender) -> None:
        transfer = self._open.get(message.transfer)
        if isinstance(message, Chunk) and message.reply is not None:
            _require_own(message.reply, writer)
        if transfer is None:
            self._told_late(writer, message)
            return
        if transfer.writer is None:
            transfer.writer = writer
        if transfer.writer != writer:
            raise InvalidArgument(f"{message.transfer} is written by {transfer.writer[0]}", field="transfer")
        match message:
            case Chunk():
                self._chunk(transfer, message)
            case GaveUp():
                self._over(transfer)
            case Trailing():
                self._fail(transfer, Cancelled("the writer gave up a push"))
        self._heard(message.transfer, writer, word_of(message))

    def _chunk(self, transfer: Transfer, chunk: Chunk) -> None:
        transfer.reply = chunk.reply or transfer.reply
        if transfer.over.is_set():
            if word_of(chunk) is Word.DONE:
                self._pool.release(transfer.landing.id, Writer.FINISHED)
            self._answers.repeat(transfer)
            return
        self._take(transfer, chunk)
        # What was lent ahead waits for no credit while it is copied; and of the end who waits for it hears first.
        is_told = transfer.over.is_set() or (chunk.ahead and transfer.committing is not None)
        if chunk.reply is not None and not is_told:
            self._answers.give(transfer)

    def _over(self, transfer: Transfer) -> None:
        """The writer is done, and listens no more."""
        self._pool.release(transfer.landing.id, Writer.FINISHED)
        transfer.reply = None
        self._fail(transfer, Cancelled("the writer gave up"))

    def _told_late(self, writer: Peer, message: FromSender) -> None:
        """A writer that was given up speaks: where it says that it is done, its landing is clean."""
        word = word_of(message)
        # A stranger is not even answered, since its address could pass for a newer one of somebody else's.
        is_known = self._in_doubt.get(message.transfer, ("", -1)) in (None, writer)
        if isinstance(message, Chunk) and message.reply is not None:
            self._answers.late(message.transfer, writer, message.reply, is_known)
        if not is_known:
            return
        if word is Word.DONE:
            self._pool.release(message.transfer, Writer.FINISHED)
        self._forget_what_is_free()
        self._heard(message.transfer, writer, word)

    def _forget_what_is_free(self) -> None:
        for owner in [each for each in self._in_doubt if self._pool.state(each) is SlabState.FREE]:
            del self._in_doubt[owner]

    def _take(self, transfer: Transfer, chunk: Chunk) -> None:
        if transfer.ring.seen(chunk.number):
            return
        try:
            lent = self._lent(transfer, chunk)
            if chunk.lent and (lent is None or transfer.must_write):
                self._ask_to_write(transfer)
                return
            ahead_bytes = transfer.landing.lent_bytes - transfer.lent_bytes
            check_chunk(chunk, transfer.ring.nbytes, lent.nbytes if lent is not None else 0, ahead_bytes)
            in_order = transfer.ring.arrived(chunk.number, chunk.run)
            if not in_order and sum(len(early.extents) for early in transfer.chunks.values()) > _MAX_EARLY_ROWS:
                raise InvalidArgument("too many extents came early", field="chunk")
        except InvalidArgument as error:
            self._fail(transfer, error)
            return
        transfer.lent_bytes += chunk.nbytes if chunk.ahead else 0
        transfer.chunks[chunk.number] = chunk
        transfer.queue.extend(transfer.chunks.pop(number) for number, _ in in_order)
        self._advance(transfer)

    def _ask_to_write(self, transfer: Transfer) -> None:
        """What was lent and came early is written as well: were it the last chunk and taken from where it lies, the
        landing would return while its writer, as it was told to, still writes."""
        for number in [number for number, early in transfer.chunks.items() if early.lent]:
            early = transfer.chunks.pop(number)
            transfer.lent_bytes -= early.nbytes if early.ahead else 0
            transfer.ring.forget(number)
        self._answers.unreadable(transfer)

    def _advance(self, transfer: Transfer) -> None:
        """Places what arrived: at once as far as that takes no time and nobody else waits, the rest in a task."""
        if transfer.committing is not None:
            return
        with self._failing(transfer):
            while transfer.queue and self._may_copy_now(transfer.queue[0].nbytes):
                chunk = transfer.queue.popleft()
                self._spend(chunk.nbytes)
                rows, lent = self._rows_of(transfer, chunk), self._source(transfer, chunk)
                wrong = self._pool.commit_at_once(transfer.landing.id, rows, lent)
                self._placed(transfer, [chunk], [wrong])
        if transfer.queue:
            transfer.committing = self._spawn(self._commit(transfer))

    def _lent(self, transfer: Transfer, chunk: Chunk) -> Bytes | None:
        """Where the extents of a chunk lie, if that is not the landing and can be read. Raises InvalidArgument."""
        return self._link.view(*transfer.writer, chunk.lent) if chunk.lent and transfer.writer is not None else None

    def _source(self, transfer: Transfer, chunk: Chunk) -> Bytes | None:
        """As `_lent` of a chunk that could be read when it came. Raises Unavailable where that is over."""
        lent = self._lent(transfer, chunk)
        if chunk.lent and lent is None:
            raise Unavailable("the writer ended before its bytes were copied")
        return lent

    def _may_copy_now(self, nbytes: int) -> bool:
        return not self._commits.locked() and self._spent + nbytes <= self._pool.inline_bytes

    def _spend(self, nbytes: int) -> None:
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._spent += nbytes

    def _next_turn(self) -> None:
        self._spent = 0

    async def _commit(self, transfer: Transfer) -> None:
        try:
            with self._failing(transfer):
                while transfer.queue:
                    if self._pool.has_kernel and transfer.queue[0].nbytes > self._pool.inline_bytes:
                        await self._place_in_turns(transfer, transfer.queue.popleft())
                        continue
                    async with self._commits:
                        await self._place_next(transfer)
        finally:
            transfer.committing = None

    async def _place_next(self, transfer: Transfer) -> None:
        chunks = self._next(transfer.queue)
        owner = transfer.landing.id
        wrong = [
            await self._pool.commit_rows(owner, self._rows_of(transfer, chunk), self._source(transfer, chunk))
            for chunk in chunks
        ]
        self._placed(transfer, chunks, wrong)

    async def _place_in_turns(self, transfer: Transfer, chunk: Chunk) -> None:
        """A chunk that takes as long as many: others have their turns in between. Ends early where the transfer did."""
        owner, rows, wrong = transfer.landing.id, self._rows_of(transfer, chunk), None
        for first, end in parts(rows, self._pool.inline_bytes):
            async with self._commits:
                if transfer.over.is_set():
                    return
                wrong = await self._pool.commit_rows(owner, rows[first:end], self._source(transfer, chunk))
            if wrong is not None:
                wrong += first
                break
        self._placed(transfer, [chunk], [wrong])

    @contextmanager
    def _failing(self, transfer: Transfer) -> Iterator[None]:
        """An error ends the transfer, not the caller."""
        try:
            yield
        except ServiceError as error:
            self._fail(transfer, error)
        except Exception as error:
            _log.error("chunk not placed", error=type(error).__name__, frames=logs.frames(error))
            self._fail(transfer, Internal("a chunk could not be placed"))

    def _next(self, queue: deque[Chunk]) -> list[Chunk]:
        """Chunks to copy at once, none where the transfer ended meanwhile: as many as need no other thread, or one."""
        chunks: list[Chunk] = []
        total = 0
        while queue and (not chunks or total + queue[0].nbytes <= self._pool.inline_bytes):
            chunks.append(queue.popleft())
            total += chunks[-1].nbytes
        return chunks

    def _rows_of(self, transfer: Transfer, chunk: Chunk) -> CopyRows:
        place_all = transfer.place_all if self._pool.has_kernel else None
        return rows_of(chunk.extents, transfer.place, place_all)

    def _placed(self, transfer: Transfer, chunks: Sequence[Chunk], wrong: Sequence[int | None]) -> None:
        """Chunks were copied; of each the number of an extent that is not as it was sealed, if there is one.

        Raises:
            DataLoss: there is one.
        """
        for chunk, index in zip(chunks, wrong, strict=True):
            if index is not None:
                raise DataLoss(f"{chunk.extents.name(index)} is not as its writer sealed it", field="digest")
            transfer.ring.took(chunk.run)
            transfer.lent_bytes -= chunk.nbytes if chunk.ahead else 0
        is_last = bool(chunks) and chunks[-1].last
        if not is_last:
            self._answers.give(transfer)
        for chunk in chunks:
            transfer.verified.update(chunk.extents.sealed())
        if is_last:
            self._pool.release(transfer.landing.id, Writer.FINISHED)
            transfer.over.set()
            self._answers.confirm(transfer)
            if transfer.writer is not None:
                self._heard(transfer.landing.id, transfer.writer, Word.DONE)

    def _fail(self, transfer: Transfer, error: ServiceError) -> None:
        """Nothing more is taken; `error` is the reason unless there is one, or everything is here."""
        transfer.queue.clear()
        if not transfer.over.is_set():
            transfer.error = error
            transfer.over.set()
            self._answers.give(transfer)


def _require_own(reply: LinkAddress, writer: Peer) -> None:
    """A writer that names another's address could have others flooded."""
    if (reply.peer, reply.epoch) != writer:
        raise InvalidArgument(f"{writer[0]} wants credit for {reply.peer}", field="reply")
