"""What a read sends and says of it: every extent of every record, where it lies and where the answer puts it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from fabric.kvlink.extents import Row
from fabric.kvlink.link import Region, Token
from fabric.records import Extent
from services.kvstore import wire
from services.kvstore.records import Identity, Record, RecordId, RecordKind
from services.kvstore.store import Served, _Sent

REGION = Region(Token(0, 0, 1 << 20, b""), np.zeros(1, np.uint8))
IDENTITY = Identity("revision", "layout")


def record(number: int, chance: random.Random, kind: RecordKind = RecordKind.BLOCK) -> Record:
    """Two extents of different groups and sizes; digests use all of their 64 bits."""
    sizes = chance.randrange(1, 500), chance.randrange(1, 500)
    groups = ("index", "latent") if kind is RecordKind.BLOCK else ("latent", "window")
    extents = tuple(
        Extent(group, 0, chance.randrange(128), at, size, chance.randrange(1 << 64))
        for group, at, size in zip(groups, (0, sizes[0]), sizes, strict=True)
    )
    key = number.to_bytes(32)
    return Record(RecordId(kind, key), IDENTITY, b"", bytes(32), chance.randrange(1 << 20), sum(sizes), extents)


def expected(records: list[Record], first_block: int) -> Iterator[tuple[Row, int]]:
    """Each extent as it is to be told, and where it lies in the tier; an anchor is of block 0."""
    end, block = 0, first_block
    for each in records:
        is_block = each.id.kind is RecordKind.BLOCK
        for extent in each.extents:
            number = block if is_block else 0
            row = (extent.group, number, extent.valid_entries, end + extent.offset, extent.size, extent.digest)
            yield row, each.offset + extent.offset
        end, block = end + each.size, block + is_block


def test_parts_and_the_anchor_behind_them_are_placed_and_told_in_order() -> None:
    chance = random.Random(5)
    records = [*[record(number, chance) for number in range(7)], record(6, chance, RecordKind.ANCHOR)]
    told: list[Row] = []
    sent = _Sent(REGION, 3, told.append)
    parts = [sent.place(records[:4]), sent.place(records[4:])]
    wanted = list(expected(records, 3))
    rows = [row for part in parts for row in part.extents.rows()]
    starts = [start for part in parts for start in part.starts.tolist()]
    assert list(zip(rows, starts, strict=True)) == wanted
    sent.tell_all()
    sent.tell_all()
    assert told == rows, "each once"
    assert (sent.blocks, sent.anchor, sent.records) == (7, True, records)


def test_the_answer_names_what_was_placed() -> None:
    chance = random.Random(6)
    answer = wire.Answer()
    sent = _Sent(REGION, 0, answer.tell)
    sent.place([record(0, chance)])
    sent.tell_all()
    message = answer.done(Served(1, anchor=False))
    assert (message.blocks, message.anchor) == (1, False)
    for told, (row, _) in zip(message.extents, expected(sent.records, 0), strict=True):
        assert (told.group, told.block, told.valid_entries, told.offset, told.size, told.digest) == row
