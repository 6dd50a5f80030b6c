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
