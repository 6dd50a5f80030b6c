"""The operator's calls on kvstores that run: which there are, and the messages of one. Knows gRPC, prints nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from cli import running
from cli.running import Running
from fabric.channels import Channels, call, stream
from fabric.errors import InvalidArgument, NotFound, ServiceError, Unavailable
from protos.deepinfer.v1 import kvstore_admin_pb2 as pb
from protos.deepinfer.v1 import kvstore_admin_pb2_grpc as rpc
from protos.deepinfer.v1 import kvstore_pb2 as store

KEY_DIGITS = 64
_ANSWER_S, _STREAM_S = 5.0, 3600.0  # no call may take longer


def stores(addresses: Sequence[str], discovery: str) -> list[Running]:
    """The kvstores meant: at these addresses, or announced there, or else those of this user's stacks.

    Raises:
        NotFound: there is none.
    """
    if addresses:
        return [Running(address, "kvstore", address) for address in addresses]
    found = running.of_discovery(discovery, "") if discovery else running.here()
    chosen = [one for one in found if one.service == "kvstore"]
    if not chosen:
        raise NotFound("no kvstore runs here", field="--discovery", fix="give --address HOST:PORT or --discovery URL")
    return chosen


def counts(one: Running) -> pb.ReadCountsResponse:
    """What an instance counts. Raises ServiceError where it does not answer."""

    async def ask() -> Any:
        async with Channels() as channels:
            stub = channels.stub(rpc.KvStoreAdminServiceStub, one.address)
            return await call(stub.ReadCounts, pb.ReadCountsRequest(), timeout_s=_ANSWER_S)

    with _named(one.address):
        reply: pb.ReadCountsResponse = asyncio.run(ask())
    return reply


def each(one: Running, method: str, request: Any, take: Callable[[Any], None]) -> None:
    """Gives every message of a streaming call to `take` as it comes. Raises ServiceError where the call fails."""

    async def run() -> None:
        async with Channels() as channels:
            replies = replies_of(channels, one.address, method, request)
            async with aclosing(replies):  # type: ignore[type-var]  # declared as an iterator, is a generator
                async for reply in replies:
                    take(reply)

    with _named(one.address):
        asyncio.run(run())


@contextmanager
def _named(address: str) -> Iterator[None]:
    """Errors of the transport, which names neither the option nor the fix, as one that does."""
    try:
        yield
    except ServiceError as error:
        if error.field or error.fix:
            raise
        fix = "name the address of a kvstore's row in the table of `deepinfer up`"
        message = f"{address} does not answer as a kvstore: {error.message}"
        raise Unavailable(message, field="--address", fix=fix) from error


def replies_of(channels: Channels, address: str, method: str, request: Any) -> AsyncIterator[Any]:
    """The messages of one of the operator's streaming calls."""
    return stream(getattr(channels.stub(rpc.KvStoreAdminServiceStub, address), method), request, timeout_s=_STREAM_S)


def holder(chosen: Sequence[Running], digits: str) -> tuple[Running, bytes]:
    """The kvstore that holds the block whose key starts with these digits, and its whole key.

    Raises:
        NotFound: none holds one. InvalidArgument: the digits name several blocks.
    """
    found: dict[bytes, Running] = {}
    wanted = pb.RecordFilter(key_prefix=digits, kind=store.RECORD_KIND_BLOCK)
    for one in chosen:
        keys: list[bytes] = []
        request = pb.ListRecordsRequest(filter=wanted, limit=2)
        each(one, "ListRecords", request, partial(_note_keys, keys))
        found.update(dict.fromkeys(keys, one))
    return _only(found, digits)


def ends(chosen: Sequence[Running], token_ids: Sequence[int]) -> tuple[Running, bytes]:
    """The kvstore that holds most leading blocks of these tokens, and the key of the last of those blocks.

    Keys are made with salts that no operator knows, so all records are looked at, some at a time.

    Raises:
        NotFound: none holds any. InvalidArgument: several prefixes, of tenants or models, stand for these tokens.
    """
    best: dict[bytes, Running] = {}
    most = 0
    for one in chosen:
        known = Chains(token_ids)
        wanted = pb.RecordFilter(kind=store.RECORD_KIND_BLOCK)
        request = pb.ListRecordsRequest(filter=wanted, with_tokens=True)
        each(one, "ListRecords", request, known.take)
        keys, length = known.longest()
        if length > most:
            best, most = {}, length
        if length == most and length:
            best.update(dict.fromkeys(keys, one))
    return _only(best, "these tokens")


class Chains:
    """Blocks that stand for parts of one sequence of tokens, and how they continue each other."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = tuple(token_ids)
        self._parts: dict[int, set[tuple[int, ...]]] = {}  # by the tokens of a block
        self._children: dict[bytes, list[tuple[bytes, tuple[int, ...]]]] = {}

    def take(self, page: pb.ListRecordsResponse) -> None:
        """Keeps those whose tokens occur where a block of their size would start."""
        for record in page.records:
            tokens = tuple(record.token_ids)
            if tokens and tokens in self._parts_of(len(tokens)):
                self._children.setdefault(record.parent_key, []).append((record.key, tokens))

    def longest(self) -> tuple[list[bytes], int]:
        """Keys of the last blocks of the longest prefixes, and how many tokens each stands for."""
        ends, at = [(bytes(32), 0)], 0
        while True:
            further = [
                (key, start + len(tokens))
                for parent, start in ends
                for key, tokens in self._children.get(parent, ())
                if self._tokens[start : start + len(tokens)] == tokens
            ]
            if not further:
                return ([key for key, _ in ends] if at else []), at
            at = max(end for _, end in further)
            ends = [item for item in further if item[1] == at]

    def _parts_of(self, size: int) -> set[tuple[int, ...]]:
        if size not in self._parts:
            self._parts[size] = {self._tokens[at : at + size] for at in range(0, len(self._tokens), size)}
        return self._parts[size]


def _note_keys(keys: list[bytes], page: pb.ListRecordsResponse) -> None:
    keys.extend(record.key for record in page.records)


def _only(found: dict[bytes, Running], what: str) -> tuple[Running, bytes]:
    if not found:
        raise NotFound(f"no kvstore holds {what}", fix="see `deepinfer kv list`")
    if len(found) > 1:
        some = ", ".join(sorted(key.hex()[:16] for key in found)[:4])
        raise InvalidArgument(f"several blocks are meant: {some}", field="--key", fix="give more digits of one")
    ((key, one),) = found.items()
    return one, key
