"""Stores: which kvstore instances there are, which one a prefix belongs to, and which do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from blake3 import blake3

from fabric.channels import Channels, call
from fabric.deaths import Incarnation
from fabric.discovery import Discovery, MemberInfo
from fabric.errors import DeadlineExceeded, ServiceError, Unavailable
from protos.deepinfer.v1 import kvstore_pb2 as pb
from protos.deepinfer.v1 import kvstore_pb2_grpc as rpc

_PROBE_S = 1.0  # between two questions to a store that did not answer, and for the answer to each


def claim(instance: str, first_key: bytes) -> bytes:
    """How strong an instance's claim to a prefix is: the greatest one among all instances wins."""
    return blake3(instance.encode() + first_key).digest()


class Store(NamedTuple):
    """One kvstore instance."""

    instance: str
    stub: rpc.KvStoreServiceStub
    life: Incarnation


class Stores:
    """The kvstore members, newest snapshot. Empty while there are none: then nothing is looked up or stored.

    A store that let a request wait in vain gets no other one until it answers a question of `probe`: a frozen one costs
    the requests that met it, not those that follow.
    """

    def __init__(self, discovery: Discovery, channels: Channels) -> None:
        self._discovery, self._channels = discovery, channels
        self._members: tuple[MemberInfo, ...] = ()
        self._silent: set[str] = set()
        self._asked = asyncio.Event()

    async def follow(self) -> None:
        """Keeps the snapshot current until cancelled; drops the channels of those that left."""
        async for members in self._discovery.members("kvstore"):
            gone = {member.address for member in self._members} - {member.address for member in members}
            self._members = members
            for address in gone:
                await self._channels.drop(address)

    async def probe(self) -> None:
        """Asks silent stores until they answer or leave; until cancelled."""
        while True:
            await self._asked.wait()
            self._silent &= {member.instance for member in self._members}
            silent = [member for member in self._members if member.instance in self._silent]
            if not silent:
                self._asked.clear()
                continue
            await asyncio.gather(*(self._question(member) for member in silent), asyncio.sleep(_PROBE_S))

    def home(self, first_key: bytes) -> Store | None:
        """The store of a prefix, by rendezvous over its first block key: membership changes move few prefixes.

        While it is silent, the one that would be it without it.
        """
        trusted = [member for member in self._members if member.instance not in self._silent]
        home = max(trusted, key=lambda member: claim(member.instance, first_key), default=None)
        return self._trusted(home) if home is not None else None

    def named(self, instance: str) -> Store | None:
        """The store of this name, if it is still there."""
        return next((self._trusted(member) for member in self._members if member.instance == instance), None)

    @contextmanager
    def asking(self, store: Store) -> Iterator[None]:
        """Around a call to a store: one that does not answer in time, or at all, is not asked again for now."""
        try:
            yield
        except (DeadlineExceeded, Unavailable):
            self._silent.add(store.instance)
            self._asked.set()
            raise

    async def _question(self, member: MemberInfo) -> None:
        try:
            await call(self._stub(member).Info, pb.KvStoreServiceInfoRequest(), timeout_s=_PROBE_S)
        except ServiceError:
            return
        self._silent.discard(member.instance)

    def _trusted(self, member: MemberInfo) -> Store | None:
        if member.instance in self._silent:
            return None
        return Store(member.instance, self._stub(member), Incarnation(member.instance, member.epoch, member.process))

    def _stub(self, member: MemberInfo) -> rpc.KvStoreServiceStub:
        return self._channels.stub(rpc.KvStoreServiceStub, member.address)
