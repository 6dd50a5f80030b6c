"""What a receiver tells its writers: credit, refusals, and again what may have been lost. Copies nothing."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from fabric.errors import Cancelled, ServiceError
from fabric.kvlink.credit import ReceiveRing
from fabric.kvlink.link import Link
from fabric.kvlink.messages import Chunk, Credit, FromReceiver, Refusal, Unreadable
from fabric.kvlink.placing import Place, PlaceAll
from fabric.records import Landing, LinkAddress
from fabric.telemetry import logs

_log = logs.get("kvlink")
# Seconds without a chunk after which a credit is said again; doubled each time up to the most.
_REPEAT_S = 0.1
_REPEAT_MOST_S = 2.0
_LISTEN_S = 1.5  # two of a sender's questions
_REMEMBERED = 1024  # transfers that are complete and closed, whose writers may not have heard of it
# Name and epoch of a link.
Peer = tuple[str, int]
# (valid entries, size, digest) as the writer sealed them, by (group, block).
Verified = dict[tuple[str, int], tuple[int, int, int]]


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer as its receiver sees it. `reply`: where its writer listens, once that is known."""

    landing: Landing
    place: Place
    place_all: PlaceAll | None
    ring: ReceiveRing
    chunks: dict[int, Chunk] = field(default_factory=dict)  # early ones
    queue: deque[Chunk] = field(default_factory=deque)
    verified: Verified = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    error: ServiceError | None = None
    lent_bytes: int = 0  # of chunks that were announced ahead and are not copied yet
    must_write: bool = False  # its writer was told that its memory cannot be read: it may write any time from now on
    writer: Peer | None = None
    reply: LinkAddress | None = None
    told: Credit | Refusal | None = None
    committing: asyncio.Task[None] | None = None
    crediting: asyncio.Task[None] | None = None

    def news_now(self) -> Credit | Refusal:
        """All that its writer needs to know."""
        owner, error = self.landing.id, self.error
        if error is not None:
            return Refusal(owner, error.code, error.message)
        return Credit(owner, self.ring.taken_out, self.ring.taken)


class Answers:
    """Notices to writers: at once where the link can, else one message at a time, since each says all."""

    def __init__(
        self, link: Link, timeout_s: float, spawn: Callable[[Coroutine[object, object, None]], asyncio.Task[None]]
    ) -> None:
        """timeout_s: after which what cannot be delivered is dropped. spawn: runs a task until its owner ends."""
        self._link, self._timeout_s, self._spawn = link, timeout_s, spawn
        self._complete: OrderedDict[str, tuple[Peer, Credit]] = OrderedDict()

    def give(self, transfer: Transfer) -> None:
        """Credit, or the error. A task says it again while no chunk comes, until everything is here."""
        reply = transfer.reply
        if reply is not None:
            news = transfer.news_now()
            with suppress(ServiceError):  # the task meets the same, and says so
                if news != transfer.told and self._link.push_at_once(reply, [], notify=news.pack()):
                    transfer.told = news
        transfer.news.set()
        if reply is not None and transfer.crediting is None and not self._knows_all(transfer):
            transfer.crediting = self._spawn(self._tell(transfer))

    def confirm(self, transfer: Transfer) -> None:
        """Everything is verified: said after those who wait for the bytes run, since to wake the writer takes a while.

        If it did not hear of it, it asks again: for so long somebody listens, though the transfer may be closed.
        """
        asyncio.get_running_loop().call_soon(self._confirm, transfer)

    def _confirm(self, transfer: Transfer) -> None:
        self.give(transfer)
        listening = ExitStack()
        with suppress(ServiceError):  # the link is being closed
            listening.enter_context(self._link.expecting())
        asyncio.get_running_loop().call_later(_LISTEN_S, listening.close)

    def repeat(self, transfer: Transfer) -> None:
        """A chunk came after the end: its writer did not hear of it."""
        transfer.told = None
        self.give(transfer)

    def unreadable(self, transfer: Transfer) -> None:
        """The writer's memory cannot be read here, and is not looked at again. The writer asks if it did not hear."""
        transfer.must_write = True
        if transfer.reply is not None:
            self._say(transfer.reply, Unreadable(transfer.landing.id))

    def remember(self, transfer: Transfer) -> None:
        """A transfer is closed; whether it was complete is still told to a writer that asks late."""
        if transfer.over.is_set() and transfer.error is None and transfer.writer is not None:
            owner = transfer.landing.id
            self._complete[owner] = transfer.writer, Credit(owner, transfer.ring.taken_out, transfer.ring.taken)
            if len(self._complete) > _REMEMBERED:
                self._complete.popitem(last=False)

    def late(self, owner: str, writer: Peer, reply: LinkAddress, refuse: bool) -> None:
        """A writer asks for a transfer that is not open. One that was complete is confirmed to who wrote it; `refuse`:
        whether others get an answer."""
        known = self._complete.get(owner)
        if known is not None and known[0] == writer:
            self._say(reply, known[1])
        elif refuse:
            self._say(reply, Refusal(owner, Cancelled.code, f"{owner} is not open"))

    def _say(self, reply: LinkAddress, news: FromReceiver) -> None:
        with suppress(ServiceError):
            if self._link.push_at_once(reply, [], notify=news.pack()):
                return
        self._spawn(self._send(reply, news))

    def _knows_all(self, transfer: Transfer) -> bool:
        """Whether nothing is left to say, nor to say again."""
        return transfer.over.is_set() and transfer.told == transfer.news_now()

    async def _tell(self, transfer: Transfer) -> None:
        """The newest credit, and the same again while no chunk comes: notices are not confirmed, and a writer that
        hears a credit twice announces again what it has sent since."""
        wait_s, again = _REPEAT_S, False
        while (reply := transfer.reply) is not None and not self._knows_all(transfer):
            transfer.news.clear()
            news = transfer.news_now()
            if again or news != transfer.told:
                transfer.told = news
                await self._send(reply, news)
            if transfer.over.is_set():
                continue
            try:
                async with asyncio.timeout(wait_s):
                    await transfer.news.wait()
                wait_s, again = _REPEAT_S, False
            except TimeoutError:
                wait_s, again = min(2 * wait_s, _REPEAT_MOST_S), True
        transfer.crediting = None

    async def _send(self, reply: LinkAddress, news: FromReceiver) -> None:
        try:
            await self._link.push(reply, [], notify=news.pack(), timeout_s=self._timeout_s)
        except ServiceError as error:
            _log.info("writer not told", peer=reply.peer, code=error.code)
