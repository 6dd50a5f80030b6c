"""Messages of pipelined transfers survive the wire, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import InvalidArgument
from fabric.kvlink import messages
from fabric.kvlink.credit import Run
from fabric.kvlink.extents import Extents
from fabric.kvlink.messages import Chunk, Credit, GaveUp, Refusal, Unreadable, Word, word_of
from fabric.records import LinkAddress

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
NAMES = st.text(min_size=1, max_size=20)
EXTENTS = st.tuples(NAMES, U32, U32, U64, U64, U64)
REPLIES = st.none() | st.builds(LinkAddress, NAMES, NAMES, U64, st.binary(max_size=50))
RUNS = st.builds(Run, U64, U64, U64)
TABLES = st.lists(EXTENTS, max_size=20).map(Extents.of)
CHUNKS = st.builds(Chunk, NAMES, U64, RUNS, st.booleans(), TABLES, REPLIES, st.binary(max_size=80))
ANSWERS = st.builds(Credit, NAMES, U64, U64) | st.builds(Refusal, NAMES, NAMES, NAMES) | st.builds(Unreadable, NAMES)
MESSAGES = CHUNKS | st.builds(GaveUp, NAMES) | ANSWERS


@given(MESSAGES)
def test_a_message_is_read_as_it_was_written_by_the_half_it_is_for(message):
    packed = message.pack()
    assert messages.unpack(packed) == message
    to_receiver = isinstance(message, Chunk | GaveUp)
    assert (messages.is_for_receiver(packed), messages.is_for_sender(packed)) == (to_receiver, not to_receiver)


@given(MESSAGES, st.data())
def test_a_message_that_was_cut_or_damaged_is_refused_or_another_message(message, data):
    packed = bytearray(message.pack())
    at = data.draw(st.integers(0, len(packed) - 1))
    damaged = packed[:at] if data.draw(st.booleans()) else packed[:at] + bytes([packed[at] ^ 0xFF]) + packed[at + 1 :]
    try:
        messages.unpack(bytes(damaged))
    except InvalidArgument as error:
        assert error.field in ("notice", "digest_kind")


@given(st.binary(max_size=60))
def test_arbitrary_bytes_raise_nothing_but_invalid_argument(payload):
    try:
        messages.unpack(payload)
    except InvalidArgument as error:
        assert error.field in ("notice", "digest_kind")


@pytest.mark.parametrize(("lent", "word"), [(b"", Word.DONE), (b"a name", Word.ALIVE)])
def test_a_last_chunk_that_is_lent_is_not_a_writers_last_word(lent, word):
    """It may have to be written yet."""
    assert word_of(Chunk("t", 0, Run(0, 0, 0), True, Extents.of(()), lent=lent)) is word


def test_another_digest_kind_is_named_in_the_refusal(monkeypatch):
    monkeypatch.setattr(messages, "DIGEST_KIND", "crc32c")
    packed = Chunk("t", 0, Run(0, 0, 0), True, Extents.of(())).pack()
    monkeypatch.undo()
    with pytest.raises(InvalidArgument, match=r"'crc32c', not 'xxh3-64'"):
        messages.unpack(packed)
