"""Discovery over etcd: leased keys, list then watch, list again on any error. Knows keys under /deepinfer/members."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import aetcd
import aetcd.exceptions
import aetcd.rpc
import aetcd.utils
import grpc

from fabric.discovery.base import Snapshot
from fabric.discovery.member import MemberInfo
from fabric.discovery.view import View
from fabric.errors import InvalidArgument, StartError, Unavailable
from fabric.telemetry import logs

_PREFIX = "/deepinfer/members"
_log = logs.get("discovery")
_FAILURES = (aetcd.exceptions.ClientError, grpc.aio.AioRpcError, grpc.aio.UsageError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where etcd is and who we are to it."""

    host: str
    port: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @staticmethod
    def parse(url: str) -> Endpoint:
        """Raises StartError where the URL is not etcd://[user:password@]host:port."""
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or not port:
            raise StartError("not etcd://host:port", field="discovery", fix="such as etcd://127.0.0.1:2379")
        password = unquote(parts.password) if parts.password else None
        return Endpoint(host, port, parts.username or None, password)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: life of a lease, its refresh, one call, between two listings, and the ends of the backoff."""

    lease_s: int = 10
    refresh_s: float = 3.0
    call_s: float = 2.0
    relist_s: float = 10.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 2.0


class EtcdDiscovery:
    """Every loop has its own client, renewed after any error; every call has a deadline, so that an etcd which is
    stopped rather than dead is noticed as well.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        timing: Timing = Timing(),
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._timing = timing
        self._clock = clock
        self._rng = rng or random.Random()

    async def ready(self, timeout_s: float) -> None:
        ends = self._clock() + timeout_s
        backoff = self._timing.backoff_min_s
        while True:
            try:
                # A call alone may take longer than there is left: connecting to a network that swallows everything.
                async with asyncio.timeout(max(backoff, ends - self._clock())), self._client() as client:
                    await client.get(_PREFIX.encode())
                    return
            except _FAILURES as error:
                where = f"{self._endpoint.host}:{self._endpoint.port}"
                _log.warning("etcd does not answer", address=where, error=type(error).__name__)
                if self._clock() + backoff > ends:
                    raise Unavailable(
                        f"etcd at {where} does not answer", field="discovery", fix="start etcd or name another one"
                    ) from error
            backoff = await self._back_off(backoff)

    @asynccontextmanager
    async def register(self, member: MemberInfo) -> AsyncIterator[None]:
        lease = _LeasedKey(_key(member.service, member.instance), member.dump(), self._timing)
        registered = asyncio.Event()
        task = asyncio.create_task(self._keep(lease, registered), name=f"register {member.instance}")
        try:
            await registered.wait()
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            with suppress(*_FAILURES):  # the lease ends by itself
                async with self._client() as client:
                    await lease.give_up(client)

    async def members(self, service: str) -> AsyncIterator[Snapshot]:
        # Long enough for every member to notice that etcd is back and to register again.
        view = View(grace_s=self._timing.lease_s + self._timing.refresh_s)
        shown: Snapshot | None = None
        backoff = self._timing.backoff_min_s
        while True:
            try:
                async with self._client() as client, aclosing(self._follow(client, service, view)) as changes:
                    async for _ in changes:
                        backoff = self._timing.backoff_min_s
                        if view.snapshot() != shown:
                            shown = view.snapshot()
                            yield shown
            except _FAILURES as error:
                view.lost()
                _log.warning("etcd lost, members kept", of=service, error=type(error).__name__)
            backoff = await self._back_off(backoff)

    async def _keep(self, lease: _LeasedKey, registered: asyncio.Event) -> None:
        """Keeps the key alive until cancelled; grants and puts again whenever etcd has forgotten it."""
        backoff = self._timing.backoff_min_s
        while True:
            try:
                async with self._client() as client:
                    while True:
                        await lease.renew(client)
                        registered.set()
                        backoff = self._timing.backoff_min_s
                        await asyncio.sleep(self._timing.refresh_s * self._rng.uniform(0.9, 1.0))
            except _FAILURES as error:
                _log.warning("etcd lost, will register again", error=type(error).__name__)
            backoff = await self._back_off(backoff)

    async def _follow(self, client: aetcd.Client, service: str, view: View) -> AsyncGenerator[None, None]:
        """Lists, watches for a while, lists again; yields after everything that may have changed the view."""
        prefix = f"{_PREFIX}/{service}/".encode()
        while True:
            listing = await client.get_prefix(prefix)
            view.listed(self._clock(), _parsed(item.value for item in listing))
            view.expire(self._clock())
            yield
            expiry = view.next_expiry()
            watch_s = self._timing.relist_s if expiry is None else min(self._timing.relist_s, expiry - self._clock())
            events = _watch(client, prefix, listing.header.revision + 1, watch_s, self._clock)
            async with aclosing(events):
                async for event in events:
                    self._apply(view, event)
                    yield

    def _apply(self, view: View, event: aetcd.rpc.Event) -> None:
        if event.type == aetcd.rpc.Event.EventType.DELETE:
            view.deleted(self._clock(), event.kv.key.decode().rsplit("/", 1)[1])
        else:
            for member in _parsed([event.kv.value]):
                view.put(member)

    async def _back_off(self, seconds: float) -> float:
        """Sleeps about `seconds`; returns how long to sleep next time."""
        await asyncio.sleep(seconds * self._rng.uniform(0.5, 1.0))
        return min(self._timing.backoff_max_s, seconds * 2)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[aetcd.Client]:
        client = aetcd.Client(
            host=self._endpoint.host,
            port=self._endpoint.port,
            username=self._endpoint.user,
            password=self._endpoint.password,
            timeout=self._timing.call_s,
        )
        try:
            await client.connect()
            yield client
        finally:
            await client.close()


class _LeasedKey:
    """One key under a lease. Renewing is the same call whether etcd still knows the lease or not."""

    def __init__(self, key: bytes, value: bytes, timing: Timing) -> None:
        self._key = key
        self._value = value
        self._timing = timing
        self._lease_id = 0

    async def renew(self, client: aetcd.Client) -> None:
        if self._lease_id:
            reply = await client.refresh_lease(self._lease_id)
            if reply is not None and reply.TTL > 0:
                return
        lease = await client.lease(self._timing.lease_s)
        await client.put(self._key, self._value, lease=lease)
        self._lease_id = lease.id

    async def give_up(self, client: aetcd.Client) -> None:
        if self._lease_id:
            await client.revoke_lease(self._lease_id)


async def _watch(
    client: aetcd.Client, prefix: bytes, revision: int, for_s: float, clock: Callable[[], float]
) -> AsyncGenerator[aetcd.rpc.Event, None]:
    """Events from `revision` on, for about `for_s` seconds: silence is checked by listing, not trusted.

    The client's own watcher has no deadline and spreads one stream over several watches; this is one stream, read here.
    """
    create = aetcd.rpc.WatchCreateRequest(
        key=prefix, range_end=aetcd.utils.prefix_range_end(prefix), start_revision=revision
    )
    ends = clock() + for_s
    call = aetcd.rpc.WatchStub(client.channel).Watch(metadata=client.metadata)
    try:
        await call.write(aetcd.rpc.WatchRequest(create_request=create))
        while True:
            reply = await _read(call, ends - clock())
            if reply is None or reply.canceled or reply.compact_revision:
                return
            for event in reply.events:
                yield event
    finally:
        call.cancel()


async def _read(
    call: grpc.aio.StreamStreamCall[aetcd.rpc.WatchRequest, aetcd.rpc.WatchResponse], for_s: float
) -> aetcd.rpc.WatchResponse | None:
    """The next message, None when none came in time."""
    try:
        async with asyncio.timeout(for_s):
            reply = await call.read()
    except TimeoutError:
        return None
    if reply is grpc.aio.EOF:
        raise ConnectionResetError("etcd ended the watch")
    return reply


def _key(service: str, instance: str) -> bytes:
    return f"{_PREFIX}/{service}/{instance}".encode()


def _parsed(values: Iterable[bytes]) -> list[MemberInfo]:
    members = []
    for value in values:
        try:
            members.append(MemberInfo.load(value))
        except InvalidArgument:
            _log.warning("ignored a key that is no member record")
    return members
