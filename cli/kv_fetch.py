"""`deepinfer kv export` in a process of its own: reads a prefix from a kvstore over the KV link, as a worker does.

KV bytes never travel in protobuf: the store names the records, writes them into a landing of this process, and each is
verified into the mapped file. Knows no model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cli import kv_calls, kv_file
from cli.console import complain, megabytes, out
from cli.kv_file import Contents, FileExtent, FileRecord
from fabric import wire
from fabric.channels import Channels, call
from fabric.errors import DataLoss, InvalidArgument, NotFound, ServiceError
from fabric.kvlink import Link, open_link
from fabric.kvlink.incoming import Intake
from fabric.kvlink.landing import LandingPool
from fabric.kvlink.link import Bytes
from fabric.kvlink.slabs import Writer
from fabric.lifecycle import background
from fabric.records import Extent
from fabric.telemetry import logs
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_admin_pb2 as admin
from protos.deepinfer.v1 import kvstore_pb2 as pb
from protos.deepinfer.v1 import kvstore_pb2_grpc as rpc

_BLOCKS = 128  # of one read
_WINDOW = 16 << 20
_TIMEOUT_S = 60.0
_KINDS = {pb.RECORD_KIND_BLOCK: "block", pb.RECORD_KIND_ANCHOR: "anchor"}


@dataclass(frozen=True, slots=True)
class Prefix:
    """The records of a prefix as the store names them: blocks in order, then perhaps the anchor of the last one."""

    model_revision: str
    layout_fingerprint: str
    records: tuple[admin.PrefixRecord, ...]

    @property
    def blocks(self) -> int:
        return sum(record.kind == pb.RECORD_KIND_BLOCK for record in self.records)

    def contents(self, with_tokens: bool) -> Contents:
        """What the file will say."""
        offsets = [0]
        for record in self.records:
            offsets.append(offsets[-1] + record.size)
        records = tuple(
            FileRecord(
                kind=_KINDS[record.kind],
                key=record.name.key.hex(),
                parent=record.parent_key.hex(),
                offset=offset,
                size=record.size,
                extents=tuple(map(_extent, wire.unpack_extents(record.extents))),
                token_ids=tuple(record.name.token_ids) if with_tokens else None,
            )
            for record, offset in zip(self.records, offsets, strict=False)
        )
        return Contents(self.model_revision, self.layout_fingerprint, records)


async def export(address: str, transport: str, key: bytes, path: Path, with_tokens: bool) -> Contents:
    """Writes the prefix up to the block called `key` to `path`, which is whole or not there.

    Raises:
        ServiceError: it is not held from its start, left meanwhile, or what came is not what was announced.
    """
    part = path.with_name(path.name + ".part")
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels())
        prefix = await _named(channels, address, key)
        contents = prefix.contents(with_tokens)
        payload = kv_file.create(part, contents)
        stack.callback(part.unlink, missing_ok=True)
        intake = await stack.enter_async_context(_receiving(transport, _window(prefix)))
        await _Fetch(channels.stub(rpc.KvStoreServiceStub, address), intake, prefix, contents, payload).all()
        payload.flush()  # type: ignore[attr-defined]  # a memory map
        part.replace(path)
    return contents


class _Fetch:
    """Reads some blocks at a time, the anchor with the last of them."""

    def __init__(
        self, stub: rpc.KvStoreServiceStub, intake: Intake, prefix: Prefix, contents: Contents, payload: Bytes
    ) -> None:
        self._stub, self._intake, self._prefix = stub, intake, prefix
        self._places: dict[
            tuple[str, int], tuple[Bytes, int, int]
        ] = {}  # bytes, valid entries and digest of each extent
        for number, record in enumerate(contents.records):
            block = number if record.kind == "block" else 0
            for extent in record.extents:
                start = record.offset + extent.offset
                place = payload[start : start + extent.size]
                self._places[extent.group, block] = place, extent.valid_entries, int(extent.digest, 16)

    async def all(self) -> None:
        blocks, anchored = self._prefix.blocks, self._prefix.blocks < len(self._prefix.records)
        for first in range(0, blocks, _BLOCKS):
            end = min(first + _BLOCKS, blocks)
            await self._some(first, end, anchor=anchored and end == blocks)

    async def _some(self, first: int, end: int, anchor: bool) -> None:
        owner = f"export-{first}"
        landing = self._intake.open(owner, _window(self._prefix), self._place)
        writer = Writer.UNKNOWN
        request = pb.GetRequest(
            blocks=[record.name for record in self._prefix.records[first:end]],
            first_block=first,
            parent_key=self._prefix.records[first].parent_key,
            anchor=anchor,
            model_revision=self._prefix.model_revision,
            layout_fingerprint=self._prefix.layout_fingerprint,
            landing=wire.pack_landing(landing),
        )
        try:
            reply: pb.GetResponse = await call(self._stub.Get, request, timeout_s=_TIMEOUT_S)
            writer = Writer.FINISHED
            if reply.blocks < end - first or reply.anchor != anchor:
                raise NotFound("records left the store meanwhile", fix="export it again")
            self._require(reply, await self._intake.ready(owner, _TIMEOUT_S))
        finally:
            await self._intake.close(owner, writer)

    def _place(self, group: str, block: int, size: int) -> Bytes:
        place = self._places.get((group, block))
        if place is None or len(place[0]) != size:
            raise InvalidArgument(f"block {block} of {group!r} was not asked for", field="extents")
        return place[0]

    def _require(self, reply: pb.GetResponse, verified: dict[tuple[str, int], tuple[int, int, int]]) -> None:
        """Raises DataLoss unless all that was told came, with the digests that the header names."""
        for extent in wire.unpack_extents(common.ExtentList(extents=reply.extents)):
            name = extent.group, extent.block
            place, valid, seal = self._places[name]
            if verified.get(name) != (valid, len(place), seal):
                raise DataLoss(f"block {extent.block} of {extent.group} is not as the store named it", field="digest")


async def _named(channels: Channels, address: str, key: bytes) -> Prefix:
    records: list[admin.PrefixRecord] = []
    revision = fingerprint = ""
    replies = kv_calls.replies_of(channels, address, "ReadPrefix", admin.ReadPrefixRequest(key=key))
    async with aclosing(replies):  # type: ignore[type-var]  # declared as an iterator, is a generator
        async for reply in replies:
            records += reply.records
            revision, fingerprint = revision or reply.model_revision, fingerprint or reply.layout_fingerprint
    return Prefix(revision, fingerprint, tuple(records))


@asynccontextmanager
async def _receiving(transport: str, window: int) -> AsyncIterator[Intake]:
    """Landing memory of this process, for one read at a time."""
    async with AsyncExitStack() as stack:
        link = open_link(transport, f"deepinfer-kv-export-{os.getpid()}", time.time_ns() // 1000)
        stack.push_async_callback(link.close)
        intake = Intake(link, LandingPool(link, 2 * window))
        stack.push_async_callback(intake.aclose)
        await stack.enter_async_context(background(_follow(link, intake), "notices"))
        yield intake


async def _follow(link: Link, intake: Intake) -> None:
    async for notice in link.notices():
        intake.noticed(notice)


def _window(prefix: Prefix) -> int:
    """Landing memory of one read: the largest extent must fit."""
    return max(_WINDOW, *(extent.size for record in prefix.records for extent in record.extents.extents))


def _extent(extent: Extent) -> FileExtent:
    return FileExtent(extent.group, extent.valid_entries, extent.offset, extent.size, f"{extent.digest:016x}")


def main(arguments: Sequence[str]) -> int:
    """Exports, and says what. 1 where it failed."""
    parser = argparse.ArgumentParser(prog="python -m cli.kv_fetch", description=__doc__)
    parser.add_argument("address", help="host:port of the kvstore's gRPC")
    parser.add_argument("transport", help="how KV moves, such as ucx://")
    parser.add_argument("key", type=bytes.fromhex, help="of the prefix's last block, in hexadecimal digits")
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("tokens", nargs="?", choices=("tokens",), help="where the file shall name them")
    asked = parser.parse_args(arguments)
    path = asked.path
    try:
        contents = asyncio.run(export(asked.address, asked.transport, asked.key, path, asked.tokens is not None))
    except ServiceError as error:
        complain(error)
        return 1
    anchor = " and their anchor" if contents.blocks < len(contents.records) else ""
    out.print(f"{contents.blocks:,} blocks{anchor}, {megabytes(contents.payload_bytes)}, in {path}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    logs.configure("export", "", "error")  # what the link does otherwise is no answer to the user
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # destructors of the wheel's libraries may crash, which says nothing about the export
