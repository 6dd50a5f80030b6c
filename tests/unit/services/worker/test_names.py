"""Names of blocks as a worker packs them are those that a store reads."""

from __future__ import annotations

import pytest

from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.kvstore import wire
from services.worker.names import Names

KEYS = [bytes([number]) * 32 for number in range(5)]
TOKENS = [bytes([number]) * 8 for number in range(5)]
NAMES = Names(KEYS, b"".join(TOKENS))


@pytest.mark.parametrize(("first", "end"), [(0, None), (0, 5), (0, 2), (1, 4), (4, 5)])
def test_a_run_of_blocks_is_named_by_its_keys_and_tokens(first: int, end: int | None) -> None:
    read = wire.names_of(pb.GetRequest(names=NAMES.pack(first, end)), None)
    assert [(name.key, name.tokens) for name in read] == list(zip(KEYS, TOKENS, strict=True))[first:end]
    assert [name.parent for name in read] == [None, *KEYS[first : 5 if end is None else end]][: len(read)]
