"""Between protobuf and the store's own values. Knows both sides' fields, bounds every list, decides nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric import wire
from fabric.errors import InvalidArgument
from fabric.kvlink.extents import Row
from fabric.records import Extent
from protos.deepinfer.v1 import common_pb2 as common
from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.kvstore.offers import KEY_BYTES, MAX_RECORDS, Offer, RecordOffer
from services.kvstore.policy.budget import Owner
from services.kvstore.policy.retention import KEEP_S, LONGEST_S
from services.kvstore.puts import Granted
from services.kvstore.records import ROOT, BlockName, Identity, RecordId, RecordKind
from services.kvstore.store import Served
from services.worker.layouts import unpack_layout
from services.worker.scopes import unpack_keeping

MAX_BLOCKS = 16_384
MAX_BLOCK_TOKENS = 4096
_TOKEN_BYTES = 4
Asking = pb.LookupRequest | pb.GetRequest | pb.PrefetchRequest
_KINDS = {pb.RECORD_KIND_BLOCK: RecordKind.BLOCK, pb.RECORD_KIND_ANCHOR: RecordKind.ANCHOR}


def names_of(message: Asking, parent: bytes | None = ROOT) -> list[BlockName]:
    """The blocks that a message asks for, one way or the other: as `unpack_names`.

    Raises:
        InvalidArgument: they are named twice, or as `unpack_names`.
    """
    if not message.HasField("names"):
        return unpack_names(message.blocks, parent)
    if message.blocks:
        raise InvalidArgument("blocks are named twice", field="names", fix="send blocks or names")
    return _unpack_packed(message.names, parent)


def _unpack_packed(message: pb.BlockNames, parent: bytes | None) -> list[BlockName]:
    keys, tokens = message.keys, message.tokens
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or not 1 <= count <= MAX_BLOCKS:
        fix = f"send 1 to {MAX_BLOCKS} keys of {KEY_BYTES} bytes"
        raise InvalidArgument(f"{len(keys)} bytes of keys", field="names.keys", fix=fix)
    size, rest = divmod(len(tokens), count)
    if rest or size % _TOKEN_BYTES or size > _TOKEN_BYTES * MAX_BLOCK_TOKENS:
        fix = f"send as many ids for each block, at most {MAX_BLOCK_TOKENS}"
        raise InvalidArgument(f"{len(tokens)} bytes of tokens for {count} blocks", field="names.tokens", fix=fix)
    each_key = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
    each_tokens = [tokens[at : at + size] for at in range(0, size * count, size)] if size else [b""] * count
    return list(map(BlockName, each_key, each_tokens, [parent, *each_key[:-1]]))


def unpack_names(messages: Sequence[pb.BlockName], parent: bytes | None = ROOT) -> list[BlockName]:
    """Each block continues the one before it, the first one `parent`: by default it starts a prefix.

    Raises:
        InvalidArgument: an empty or endless list, or a name that is none.
    """
    if not 1 <= len(messages) <= MAX_BLOCKS:
        raise InvalidArgument(f"{len(messages)} blocks", field="blocks", fix=f"ask for 1 to {MAX_BLOCKS}")
    names = []
    for message in messages:
        names.append(_unpack_name(message, parent))
        parent = names[-1].key
    return names


def unpack_parent(message: pb.GetRequest) -> bytes | None:
    """What the first block that is asked for continues; None where the caller does not say.

    Raises:
        InvalidArgument: it is no key, or a prefix's first block is said to continue another one.
    """
    if not message.parent_key:
        return None if message.first_block else ROOT
    if len(message.parent_key) != KEY_BYTES or (not message.first_block and message.parent_key != ROOT):
        raise InvalidArgument("not the key of the block before", field="parent_key", fix=f"send {KEY_BYTES} bytes")
    return message.parent_key


def unpack_identity(message: Any) -> Identity:
    return Identity(message.model_revision, message.layout_fingerprint)


async def next_message(requests: AsyncIterator[pb.PutRequest], expected: str) -> pb.PutRequest:
    """The next message of the stream. Raises InvalidArgument where it is not the expected one, or none comes."""
    message = await anext(aiter(requests), None)
    found = "the end of the stream" if message is None else message.WhichOneof("message")
    if message is None or found != expected:
        raise InvalidArgument(f"{found} came instead of {expected}", field=expected, fix="send offer, then commit")
    return message


def unpack_offer(message: pb.PutOffer) -> Offer:
    """Without a class nothing is kept longer than it is worth.

    Raises:
        InvalidArgument: a field is none that a store could take.
    """
    if len(message.records) > MAX_RECORDS:
        raise InvalidArgument(f"{len(message.records)} records", field="offer.records", fix=f"at most {MAX_RECORDS}")
    layout, owner = unpack_layout(message.layout, "offer.layout"), _unpack_owner(message, "offer")
    return Offer(
        records=tuple(_unpack_record(record) for record in message.records),
        identity=Identity(message.model_revision, layout.fingerprint),
        layout=layout,
        keep_s=KEEP_S[owner.retention] if message.retention else 0.0,
        owner=owner,
    )


def _unpack_owner(message: pb.PutOffer | pb.RetainRequest, parent: str = "") -> Owner:
    keeping = unpack_keeping(message.owner, message.retention, parent)
    return Owner(keeping.owner.hex(), keeping.retention)


def unpack_commit(message: pb.PutCommit) -> list[tuple[Extent, ...]]:
    """Raises InvalidArgument for digests of another kind."""
    if message.digest_kind != common.DIGEST_KIND_XXH3_64:
        raise InvalidArgument(
            "only xxh3-64 digests are known here", field="commit.digest_kind", fix="seal with xxh3-64"
        )
    return [wire.unpack_extents(record) for record in message.records]


@dataclass(frozen=True, slots=True)
class Keep:
    """A Retain: which records, for how many seconds, for whom, and most bytes of this call."""

    keys: tuple[bytes, ...]
    keep_s: float
    owner: Owner
    most_bytes: int


def unpack_keep(message: pb.RetainRequest, capacity_bytes: int) -> Keep:
    """Without a time the class decides, without a budget the capacity.

    Raises:
        InvalidArgument: keys, owner, class or time are none that a store could keep.
    """
    if len(message.keys) > MAX_BLOCKS or any(len(key) != KEY_BYTES for key in message.keys):
        raise InvalidArgument("not a list of block keys", field="keys", fix=f"send at most {MAX_BLOCKS} keys")
    owner = _unpack_owner(message)
    keep_s = message.keep_ms / 1000 or (KEEP_S[owner.retention] if message.retention else 0.0)
    if not 0 < keep_s <= LONGEST_S:
        raise InvalidArgument(
            f"{keep_s:.0f} s", field="keep_ms", fix=f"name a class, or at most {LONGEST_S * 1000:.0f} ms"
        )
    return Keep(tuple(message.keys), keep_s, owner, message.budget_bytes or capacity_bytes)


def pack_grant(granted: Granted) -> pb.PutResponse:
    landing = wire.pack_landing(granted.landing) if granted.landing is not None else None
    return pb.PutResponse(
        grant=pb.PutGrant(
            wanted=granted.wanted,
            landing=landing,
            offsets=granted.offsets,
            other_instance=granted.other_instance,
        )
    )


class Answer:
    """What a Get answers, made as its extents become known."""

    def __init__(self) -> None:
        self._message = pb.GetResponse(digest_kind=common.DIGEST_KIND_XXH3_64)

    def tell(self, row: Row) -> None:
        """Adds an extent."""
        group, block, valid_entries, offset, size, digest = row
        self._message.extents.add(
            group=group, block=block, valid_entries=valid_entries, offset=offset, size=size, digest=digest
        )

    def done(self, served: Served) -> pb.GetResponse:
        """The answer, after the last extent."""
        self._message.blocks, self._message.anchor = served.blocks, served.anchor
        return self._message


def _unpack_record(message: pb.RecordOffer) -> RecordOffer:
    kind = _KINDS.get(message.kind)
    if kind is None:
        raise InvalidArgument("unknown kind of record", field="offer.records.kind", fix="BLOCK or ANCHOR")
    name = _unpack_name(message.name, message.parent_key)
    return RecordOffer(RecordId(kind, name.key), name, message.parent_key, message.size)


def _unpack_name(message: pb.BlockName, parent: bytes | None) -> BlockName:
    key, tokens, ids = message.key, message.tokens, message.token_ids  # each access makes an object
    if ids:
        if tokens or len(ids) > MAX_BLOCK_TOKENS:
            raise InvalidArgument("not the tokens of a block", field="blocks", fix="send one block of ids, one way")
        tokens = np.asarray(ids, dtype="<u4").tobytes()
    if len(key) != KEY_BYTES or len(tokens) > _TOKEN_BYTES * MAX_BLOCK_TOKENS or len(tokens) % _TOKEN_BYTES:
        raise InvalidArgument(
            "not the name of a block", field="blocks", fix=f"{KEY_BYTES} bytes of key, one block of ids"
        )
    return BlockName(key, tokens, parent)
