"""What every discovery backend promises, and what etcd promises beyond."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

from fabric.discovery import Discovery, MemberInfo, open_discovery
from fabric.discovery.base import Snapshot
from fabric.discovery.etcd import Endpoint, EtcdDiscovery, Timing
from fabric.errors import StartError, Unavailable
from tests.support.servers import Server, etcd_server, free_ports

# etcd grants no lease shorter than 2 s; the rest is scaled to it.
FAST = Timing(lease_s=2, refresh_s=0.4, call_s=0.5, relist_s=0.5, backoff_min_s=0.05, backoff_max_s=0.2)
ONE = MemberInfo(
    "decode", "decode-1", "127.0.0.1:7001", 1, "nano", "rev", "layout", ("csa/1", "hca/1"), {"max_sequences": 8}
)
TWO = dataclasses.replace(ONE, instance="decode-2", address="127.0.0.1:7002")
OTHER = dataclasses.replace(ONE, service="prefill", instance="prefill-1")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Server]:
    """One that a test may break."""
    with etcd_server(tmp_path) as server:
        yield server


@pytest.fixture(params=["memory", "etcd"])
def dynamic(request: pytest.FixtureRequest) -> str:
    """URLs of the backends that instances register with."""
    if request.param == "memory":
        return f"memory://{request.node.name}"
    etcd: Server = request.getfixturevalue("etcd")
    return etcd.url


@pytest.fixture(params=["memory", "etcd", "static"])
def any_backend(request: pytest.FixtureRequest) -> str:
    match request.param:
        case "memory":
            return f"memory://{request.node.name}"
        case "etcd":
            etcd: Server = request.getfixturevalue("etcd")
            return etcd.url
    return "static://decode=127.0.0.1:7001"


class Watcher:
    """Reads the snapshots of one service in the background."""

    def __init__(self, discovery: Discovery, service: str) -> None:
        self.seen: list[Snapshot] = []
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._read(discovery, service))

    async def until(self, wanted: Callable[[Snapshot], bool], timeout_s: float = 10.0) -> Snapshot:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: bool(self.seen) and wanted(self.seen[-1]))
            return self.seen[-1]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self, discovery: Discovery, service: str) -> None:
        async with aclosing(discovery.members(service)) as snapshots:
            async for snapshot in snapshots:
                async with self._changed:
                    self.seen.append(snapshot)
                    self._changed.notify_all()


@pytest.fixture
async def watch() -> AsyncIterator[Callable[[Discovery, str], Watcher]]:
    async with AsyncExitStack() as stack:

        def start(discovery: Discovery, service: str = "decode") -> Watcher:
            watcher = Watcher(discovery, service)
            stack.push_async_callback(watcher.close)
            return watcher

        yield start


def names(snapshot: Snapshot) -> list[str]:
    return [member.instance for member in snapshot]


async def test_a_backend_is_ready_and_gives_a_snapshot_at_once(any_backend, watch):
    discovery = open_discovery(any_backend)
    await discovery.ready(5.0)
    watcher = watch(discovery)
    await watcher.until(lambda _: True, 10.0)


async def test_registering_is_allowed_on_every_backend(any_backend):
    discovery = open_discovery(any_backend)
    async with discovery.register(ONE):
        pass


async def test_members_arrive_whole_come_and_go(dynamic, watch):
    here, there = open_discovery(dynamic), open_discovery(dynamic)
    watcher = watch(there)
    await watcher.until(lambda snapshot: snapshot == ())
    async with here.register(TWO):
        async with here.register(ONE), here.register(OTHER):
            assert await watcher.until(lambda s: len(s) == 2) == (ONE, TWO)
        assert await watcher.until(lambda s: len(s) == 1) == (TWO,)
    await watcher.until(lambda s: s == ())
    assert all(OTHER not in snapshot for snapshot in watcher.seen)


async def test_a_newer_epoch_replaces_the_older_incarnation(dynamic, watch):
    discovery = open_discovery(dynamic)
    watcher = watch(discovery)
    reborn = dataclasses.replace(ONE, epoch=2, address="127.0.0.1:7009")
    async with discovery.register(ONE):
        await watcher.until(lambda s: s == (ONE,))
        async with discovery.register(reborn):
            await watcher.until(lambda s: s == (reborn,))


async def test_two_watchers_see_the_same(dynamic, watch):
    discovery = open_discovery(dynamic)
    watchers = [watch(discovery), watch(discovery)]
    async with discovery.register(ONE):
        for watcher in watchers:
            await watcher.until(lambda s: s == (ONE,))


async def test_static_lists_what_its_url_says():
    discovery = open_discovery("static://decode=127.0.0.1:2,recipe=127.0.0.1:9,decode=127.0.0.1:1")
    async with aclosing(discovery.members("decode")) as snapshots:
        assert [member.address for member in await anext(snapshots)] == ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.mark.parametrize(
    "url", ["", "zookeeper://x", "etcd://", "etcd://host", "static://decode", "static://decode=host"]
)
def test_a_malformed_url_is_a_start_error_that_names_the_setting(url):
    with pytest.raises(StartError) as caught:
        open_discovery(url)
    assert caught.value.field == "discovery"
    assert caught.value.fix


async def test_no_etcd_is_unavailable_within_the_wait():
    (port,) = free_ports(1)
    discovery = EtcdDiscovery(Endpoint("127.0.0.1", port), FAST)
    with pytest.raises(Unavailable, match="does not answer"):
        async with asyncio.timeout(5.0):
            await discovery.ready(0.6)


def fast(etcd: Server) -> EtcdDiscovery:
    return EtcdDiscovery(Endpoint.parse(etcd.url), FAST)


async def test_a_dead_instance_leaves_when_its_lease_ends(own_etcd, watch):
    watcher = watch(fast(own_etcd))
    registration = fast(own_etcd).register(ONE)
    await registration.__aenter__()
    await watcher.until(lambda s: s == (ONE,))
    for task in asyncio.all_tasks():
        if task.get_name() == f"register {ONE.instance}":
            task.cancel()  # what a killed process does: it refreshes no more and withdraws nothing
    await watcher.until(lambda s: s == (), timeout_s=8.0)


async def test_losing_etcd_never_empties_the_pool_and_a_new_empty_etcd_is_filled_again(own_etcd, watch):
    watcher, late = watch(fast(own_etcd)), None
    async with fast(own_etcd).register(ONE), fast(own_etcd).register(TWO):
        await watcher.until(lambda s: len(s) == 2)
        own_etcd.kill()
        await asyncio.sleep(1.5)  # several failed calls
        own_etcd.start(keep_data=False)
        late = watch(fast(own_etcd))
        await late.until(lambda s: len(s) == 2, timeout_s=15.0)
        assert watcher.seen[-1] == (ONE, TWO)
        assert all(len(snapshot) == 2 for snapshot in watcher.seen[watcher.seen.index((ONE, TWO)) :])
    await watcher.until(lambda s: s == (), timeout_s=15.0)


async def test_a_frozen_etcd_is_noticed_and_its_expired_leases_are_not_believed(own_etcd, watch):
    watcher = watch(fast(own_etcd))
    async with fast(own_etcd).register(ONE):
        await watcher.until(lambda s: s == (ONE,))
        own_etcd.process.freeze()
        with pytest.raises(Unavailable):
            await fast(own_etcd).ready(0.5)
        await asyncio.sleep(FAST.lease_s + 1.0)  # the lease ends while etcd sleeps
        own_etcd.process.thaw()
        await fast(own_etcd).ready(10.0)
        late = watch(fast(own_etcd))
        await late.until(lambda s: s == (ONE,), timeout_s=15.0)
        assert all(snapshot == (ONE,) for snapshot in watcher.seen[watcher.seen.index((ONE,)) :])


async def test_a_member_that_died_while_etcd_was_away_leaves_after_the_grace(own_etcd, watch):
    watcher = watch(fast(own_etcd))
    async with fast(own_etcd).register(ONE):
        async with fast(own_etcd).register(TWO):
            await watcher.until(lambda s: len(s) == 2)
            own_etcd.kill()
            await asyncio.sleep(1.5)
        own_etcd.start(keep_data=False)
        await watcher.until(lambda s: s == (ONE,), timeout_s=15.0)
