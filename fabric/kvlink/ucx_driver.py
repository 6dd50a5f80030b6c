"""Drives a NIXL agent: jobs in, completions and notices out. Knows when to poll and when to sleep.

A thread sleeps on its queue while nothing is in flight and nothing is expected, so an idle link costs nothing here.
Otherwise it polls, since NIXL wakes nobody in Python: often at first, rarer the longer nothing comes. A short push to a
peer that was reached before is posted by its caller at once, if the agent is free: two changes of thread take as long
as copying a megabyte.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from fabric.errors import Cancelled, ServiceError, Unavailable
from fabric.kvlink.inbox import Inbox
from fabric.kvlink.plan import Copies
from fabric.kvlink.ucx_agent import Agent, agent_name
from fabric.records import LinkAddress
from fabric.telemetry import logs

_log = logs.get("kvlink")
ResultT = TypeVar("ResultT")
Planned = list[Copies]

# Seconds. A poll may delay what it finds by a tenth of the time already waited, within these bounds.
_SHARE = 0.1
_MIN_S = 0.00005
_MAX_TRANSFER_S = 0.001
_MAX_NOTICE_S = 0.005
# A link whose neighbours ring waits so many times its patience while it never heard of anybody else: a look while it
# waits for a neighbour takes a third of a millisecond from it, and nobody else may be there.
_UNHEARD = 5
# A post copies before it returns where the lane is shared memory: the caller's event loop waits for so many bytes at
# most, about a millisecond.
_INLINE_BYTES = 8 << 20
# Looks at a short push before it is left to the thread: together shorter than a change of threads.
_LOOKS = 12
# So long a short push waits for a poll to end before it is handed to the thread.
_TURN_S = 0.0005


@dataclass(slots=True, eq=False)
class _Transfer:
    """One push in flight. Whoever waits gives it up by cancelling the future."""

    handle: int
    peer: str
    started_at: float
    future: Future[None]


class _Turn(Enum):
    """Turns of the thread without a job."""

    POLL = "poll"
    END = "end"


class Driver:
    """Owns the agent; whoever holds `_turn` may call it. Public methods may be called from any thread."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, inbox: Inbox, patience_s: float = 0.0) -> None:
        """Raises StartError where the agent cannot start. patience_s: between two looks for notices, at least; a link
        whose neighbours ring must not keep a core busy looking for others while they are served."""
        self._loop = loop
        self._inbox = inbox
        self._patience_s, self._heard = patience_s, False
        self._jobs: queue.SimpleQueue[Callable[[Agent], None] | _Turn] = queue.SimpleQueue()
        self._metadata: dict[str, bytes] = {}
        self._transfers: list[_Transfer] = []
        self._expecting = 0
        self._quiet_since = 0.0
        self._open = True
        self._turn = threading.Lock()
        started: Future[Agent] = Future()
        self._thread = threading.Thread(target=self._run, args=(name, started), name="kvlink-ucx", daemon=True)
        self._thread.start()
        self._agent = started.result()

    def submit(self, work: Callable[[Agent], ResultT]) -> Future[ResultT]:
        """Runs `work` on the agent's thread."""
        future: Future[ResultT] = Future()

        def job(agent: Agent) -> None:
            try:
                future.set_result(work(agent))
            except BaseException as error:
                future.set_exception(error)

        self._put(job)
        return future

    def push(self, address: LinkAddress, planned: Planned, notify: bytes) -> Future[None] | None:
        """Starts a transfer. Returns None where it is done, else a future that ends when it is.

        Cancelling the future gives the transfer up.

        Raises:
            Unavailable: the link is closed, or the peer is gone and a short push noticed it at once.
        """
        peer = agent_name(address.peer, address.epoch)
        if self._is_short(peer, address, planned) and self._turn.acquire(timeout=_TURN_S):
            try:
                return self._push_now(self._agent, peer, planned, notify)
            finally:
                self._turn.release()
        future: Future[None] = Future()
        self._put(lambda agent: self._start(agent, peer, address, planned, notify, future))
        return future

    def forget(self, peer: str) -> None:
        """Fails what is in flight to an incarnation that is gone, and drops its metadata."""
        self._put(lambda agent: self._forget(agent, peer))

    def expect(self, change: int) -> None:
        """Counts who waits for notices; from the event loop alone. Nobody is woken to hear that one waits no more."""
        self._expecting += change
        if change > 0:
            self._quiet_since = time.monotonic()
            if self._patience_s:
                self._loop.call_later(self._rest_s, self._look_for_notices)
            else:
                self._put(_Turn.POLL)

    @property
    def closed(self) -> bool:
        return not self._open

    def close(self) -> None:
        """Ends the thread and the agent; what is in flight fails."""
        if self._open:
            self._open = False
            self._jobs.put(_Turn.END)
        self._thread.join()

    @property
    def _rest_s(self) -> float:
        """Between two looks for notices, at least."""
        return self._patience_s if self._heard else _UNHEARD * self._patience_s

    def _look_for_notices(self) -> None:
        if self._open and self._expecting:
            self._put(_Turn.POLL)

    def _is_short(self, peer: str, address: LinkAddress, planned: Planned) -> bool:
        reached = bool(planned) and self._metadata.get(peer) == address.metadata
        return self._open and reached and sum(copies.nbytes for copies in planned) <= _INLINE_BYTES

    def _push_now(self, agent: Agent, peer: str, planned: Planned, notify: bytes) -> Future[None] | None:
        """Posts in the caller's thread; where the bytes are not there when that returns, the thread polls the rest."""
        try:
            handle = agent.post(peer, planned, notify)
            for _ in range(_LOOKS):
                if agent.done(handle):
                    agent.release(handle)
                    return None
        except ServiceError as error:
            self._fail_peer(agent, peer, error)
            raise
        transfer = _Transfer(handle, peer, time.monotonic(), Future())
        self._transfers.append(transfer)
        self._put(_Turn.POLL)
        return transfer.future

    def _put(self, job: Callable[[Agent], None] | _Turn) -> None:
        if not self._open:
            raise Unavailable("this link is closed")
        self._jobs.put(job)

    def _run(self, name: str, started: Future[Agent]) -> None:
        try:
            agent = Agent(name)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(agent)
        sleep_s: float | None = None
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=sleep_s)
                except queue.Empty:
                    job = _Turn.POLL
                if job is _Turn.END:
                    return
                with self._turn:
                    if not isinstance(job, _Turn):
                        job(agent)
                    self._poll(agent)
                    sleep_s = self._sleep_s()
        finally:
            with self._turn:
                self._open = False
                for transfer in list(self._transfers):
                    self._end(agent, transfer, Cancelled("the link was closed"))
                agent.close()

    def _sleep_s(self) -> float | None:
        """How long to wait for a job before polling again; None when there is nothing to poll for."""
        now = time.monotonic()
        waits = []
        if self._transfers:
            waits.append(min(_MAX_TRANSFER_S, (now - self._transfers[-1].started_at) * _SHARE))
        if self._expecting:
            waits.append(max(self._rest_s, min(_MAX_NOTICE_S, (now - self._quiet_since) * _SHARE)))
        return max(_MIN_S, min(waits)) if waits else None

    def _start(
        self, agent: Agent, peer: str, address: LinkAddress, planned: Planned, notify: bytes, future: Future[None]
    ) -> None:
        if future.cancelled():
            return
        try:
            if self._metadata.get(peer) != address.metadata:
                agent.load_peer(address.metadata)
                self._metadata[peer] = address.metadata
            if planned:
                transfer = _Transfer(agent.post(peer, planned, notify), peer, time.monotonic(), future)
                self._transfers.append(transfer)
                self._look(agent, transfer)
                return
            if notify:
                agent.notify(peer, notify)
            _settle(future, None)
        except ServiceError as error:
            self._fail_peer(agent, peer, error)
            _settle(future, error)

    def _poll(self, agent: Agent) -> None:
        for transfer in list(self._transfers):
            if transfer in self._transfers:  # else it ended together with its peer
                self._look(agent, transfer)
        if self._expecting and self._inbox.room > 0:
            self._take_notices(agent)

    def _look(self, agent: Agent, transfer: _Transfer) -> None:
        """Ends a transfer that is done, given up or failed."""
        try:
            if transfer.future.cancelled() or agent.done(transfer.handle):
                self._end(agent, transfer, None)
        except ServiceError as error:
            self._end(agent, transfer, error)
            self._fail_peer(agent, transfer.peer, error)

    def _take_notices(self, agent: Agent) -> None:
        try:
            notices = agent.arrived()
        except Exception as error:  # whatever a peer sent: the thread serves all the others too
            _log.error("notifications lost", error=type(error).__name__)
            return
        if notices:
            self._heard, self._quiet_since = True, time.monotonic()
            self._loop.call_soon_threadsafe(self._inbox.put_now, notices)

    def _end(self, agent: Agent, transfer: _Transfer, error: ServiceError | None) -> None:
        self._transfers.remove(transfer)
        agent.release(transfer.handle)
        _settle(transfer.future, error)

    def _fail_peer(self, agent: Agent, peer: str, error: ServiceError) -> None:
        """A peer that is gone must be met anew: its connection does not heal."""
        if isinstance(error, Unavailable):
            self._forget(agent, peer)

    def _forget(self, agent: Agent, peer: str) -> None:
        for transfer in [each for each in self._transfers if each.peer == peer]:
            self._end(agent, transfer, Unavailable(f"{peer} is gone"))
        if self._metadata.pop(peer, None) is not None:
            try:
                agent.forget_peer(peer)
            except ServiceError as error:
                _log.warning("peer not forgotten", peer=peer, error=str(error))


def _settle(future: Future[None], error: ServiceError | None) -> None:
    """Ends a future that its owner may cancel at the same moment."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
