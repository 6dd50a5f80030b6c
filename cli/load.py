"""How busy the workers say they are. Knows their Watch streams, not the requests behind the numbers."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import grpc

from fabric.channels import Channels
from protos.deepinfer.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the engine and before it, and the share of KV blocks in use (0 to 1)."""

    running: int
    waiting: int
    kv_used: float


class LoadBoard:
    """Last word of each worker. Follows a worker's stream for as long as it stays at one address."""

    def __init__(self) -> None:
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._loads: dict[str, Load] = {}
        self._channels = Channels()

    def follow(self, workers: dict[str, str]) -> None:
        """Follows exactly these workers: address -> "prefill" or "decode"."""
        for address in self._followers.keys() - workers.keys():
            self._followers.pop(address).cancel()
            self._loads.pop(address, None)
        for address in workers.keys() - self._followers.keys():
            self._followers[address] = asyncio.create_task(self._listen(address, workers[address]))

    def load(self, address: str) -> Load | None:
        """What the worker said last; None before its first word and after it is gone."""
        return self._loads.get(address)

    async def close(self) -> None:
        followers = list(self._followers.values())
        self.follow({})
        await asyncio.gather(*followers, return_exceptions=True)
        await self._channels.close()

    async def _listen(self, address: str, service: str) -> None:
        # A status stream has no natural end; an hour is the longest deadline that services grant, then it is reopened.
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for reply in self._watch(address, service):
                    status = reply.status
                    used = 1 - status.blocks_free / status.blocks_total if status.blocks_total else 0.0
                    self._loads[address] = Load(status.running_requests, status.waiting_requests, used)
            self._loads.pop(address, None)
            await asyncio.sleep(1)

    def _watch(self, address: str, service: str) -> Any:
        if service == "prefill":
            prefill = self._channels.stub(prefill_pb2_grpc.PrefillServiceStub, address)
            return prefill.Watch(prefill_pb2.PrefillServiceWatchRequest(), timeout=3600)
        decode = self._channels.stub(decode_pb2_grpc.DecodeServiceStub, address)
        return decode.Watch(decode_pb2.DecodeServiceWatchRequest(), timeout=3600)
