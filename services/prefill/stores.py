"""Stores: which kvstore instances there are and which one a prefix belongs to. Knows members; asks them nothing."""

from __future__ import annotations

from blake3 import blake3

from fabric.channels import Channels
from fabric.discovery import Discovery, MemberInfo
from protos.deepinfer.v1 import kvstore_pb2_grpc as rpc


class Stores:
    """The kvstore members, newest snapshot. Empty while there are none: then nothing is looked up or stored."""

    def __init__(self, discovery: Discovery, channels: Channels) -> None:
        self._discovery, self._channels = discovery, channels
        self._members: tuple[MemberInfo, ...] = ()

    async def follow(self) -> None:
        """Keeps the snapshot current until cancelled; drops the channels of those that left."""
        async for members in self._discovery.members("kvstore"):
            gone = {member.address for member in self._members} - {member.address for member in members}
            self._members = members
            for address in gone:
                await self._channels.drop(address)

    def home(self, first_key: bytes) -> rpc.KvStoreServiceStub | None:
        """The store of a prefix, by rendezvous over its first block key: membership changes move few prefixes."""
        if not self._members:
            return None
        best = max(self._members, key=lambda member: blake3(member.instance.encode() + first_key).digest())
        return self._stub(best)

    def named(self, instance: str) -> rpc.KvStoreServiceStub | None:
        """The store of this name, if it is still there."""
        return next((self._stub(member) for member in self._members if member.instance == instance), None)

    def _stub(self, member: MemberInfo) -> rpc.KvStoreServiceStub:
        return self._channels.stub(rpc.KvStoreServiceStub, member.address)
