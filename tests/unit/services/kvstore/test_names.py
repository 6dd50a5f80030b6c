"""Names of blocks as messages bring them: tokens as numbers or as the bytes that are kept, never both, never none."""

from __future__ import annotations

import numpy as np
import pytest

from fabric.errors import InvalidArgument
from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.kvstore import wire

IDS = [7, 0, 2**32 - 1]
TOKENS = np.array(IDS, "<u4").tobytes()
KEYS = [bytes([number]) * 32 for number in (1, 2)]


def test_numbers_and_bytes_name_the_same_block() -> None:
    numbers, packed = ({"token_ids": IDS}, {"tokens": TOKENS})
    by_number, by_bytes = (
        wire.unpack_names([pb.BlockName(key=key, **tokens) for key in KEYS]) for tokens in (numbers, packed)
    )
    assert by_number == by_bytes
    assert [(name.key, name.tokens, name.parent) for name in by_bytes] == [
        (KEYS[0], TOKENS, bytes(32)),
        (KEYS[1], TOKENS, KEYS[0]),
    ]


@pytest.mark.parametrize(
    "message",
    [
        pb.BlockName(key=KEYS[0], tokens=TOKENS, token_ids=IDS),
        pb.BlockName(key=KEYS[0], tokens=TOKENS[:-1]),
        pb.BlockName(key=KEYS[0], tokens=bytes(4 * (wire.MAX_BLOCK_TOKENS + 1))),
        pb.BlockName(key=KEYS[0], token_ids=[1] * (wire.MAX_BLOCK_TOKENS + 1)),
        pb.BlockName(key=KEYS[0][1:], tokens=TOKENS),
    ],
)
def test_what_names_no_block_is_refused(message: pb.BlockName) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.unpack_names([message])
    assert caught.value.field == "blocks" and caught.value.fix


REQUESTS = (pb.LookupRequest, pb.GetRequest, pb.PrefetchRequest)


@pytest.mark.parametrize("request_type", REQUESTS)
@pytest.mark.parametrize("tokens", [TOKENS, b""])
def test_names_that_are_packed_are_those_of_a_message_for_each(request_type: type[wire.Asking], tokens: bytes) -> None:
    parent = bytes([9]) * 32
    each = request_type(blocks=[pb.BlockName(key=key, tokens=tokens) for key in KEYS])
    packed = request_type(names=pb.BlockNames(keys=b"".join(KEYS), tokens=tokens * len(KEYS)))
    assert wire.names_of(packed, parent) == wire.names_of(each, parent) == wire.unpack_names(each.blocks, parent)
    assert [name.parent for name in wire.names_of(packed, None)] == [None, KEYS[0]]


@pytest.mark.parametrize(
    ("field", "keys", "tokens"),
    [
        ("names.keys", b"", b""),
        ("names.keys", KEYS[0][1:], TOKENS),
        ("names.keys", bytes(32 * (wire.MAX_BLOCKS + 1)), b""),
        ("names.tokens", b"".join(KEYS), TOKENS),
        ("names.tokens", KEYS[0], TOKENS[:-1]),
        ("names.tokens", KEYS[0], bytes(4 * (wire.MAX_BLOCK_TOKENS + 1))),
    ],
)
def test_packed_names_that_are_none_are_refused(field: str, keys: bytes, tokens: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.names_of(pb.LookupRequest(names=pb.BlockNames(keys=keys, tokens=tokens)))
    assert caught.value.field == field and caught.value.fix


def test_blocks_that_are_named_twice_are_refused() -> None:
    names = pb.BlockNames(keys=KEYS[0], tokens=TOKENS)
    with pytest.raises(InvalidArgument, match="twice"):
        wire.names_of(pb.GetRequest(blocks=[pb.BlockName(key=KEYS[0], tokens=TOKENS)], names=names))
