"""Frames of the TCP transport: what was packed is read back, anything else is refused as a domain error."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.errors import InvalidArgument
from fabric.kvlink import tcp_frames as frames
from fabric.kvlink.tcp_frames import Answer, Greeting

EPOCHS = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(EPOCHS, EPOCHS, st.text(max_size=60), st.text(max_size=60))
def test_greetings_round_trip(writer_epoch, target_epoch, writer, target):
    packed = Greeting(writer_epoch, target_epoch, writer, target).pack()
    head = frames.unpack_greeting(packed[: frames.GREETING_BYTES])
    assert head == (writer_epoch, target_epoch, len(writer.encode()), len(target.encode()))
    assert packed[frames.GREETING_BYTES :] == (writer + target).encode()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**40), st.integers(0, 2**40)), max_size=20),
    st.binary(max_size=50),
)
def test_pushes_round_trip(copies, notice):
    table = np.array(copies, np.int64).reshape(-1, 3)
    packed = frames.pack_push(table, notice)
    count, notice_bytes, payload_bytes = frames.unpack_push(packed[: frames.PUSH_BYTES])
    body = packed[frames.PUSH_BYTES :]
    assert np.array_equal(frames.unpack_copies(body[: count * frames.COPY_BYTES]), table)
    assert body[count * frames.COPY_BYTES :] == notice
    assert (notice_bytes, payload_bytes) == (len(notice), int(table[:, 2].sum()))


@pytest.mark.parametrize("answer", Answer)
def test_answers_round_trip(answer):
    assert frames.unpack_answer(frames.pack_answer(answer)) is answer


@settings(deadline=None)
@given(st.binary(min_size=frames.GREETING_BYTES, max_size=frames.GREETING_BYTES))
def test_arbitrary_bytes_are_no_frame(noise):
    if noise[:4] == struct.pack("<I", frames.MAGIC):
        return
    for read, size in (
        (frames.unpack_greeting, frames.GREETING_BYTES),
        (frames.unpack_push, frames.PUSH_BYTES),
        (frames.unpack_answer, frames.ANSWER_BYTES),
    ):
        with pytest.raises(InvalidArgument):
            read(noise[:size])


def test_absurd_lengths_are_refused_before_memory_is_taken():
    with pytest.raises(InvalidArgument):
        frames.unpack_push(struct.pack("<IIIQ", frames.MAGIC, 2**31, 0, 0))
    with pytest.raises(InvalidArgument):
        frames.unpack_push(struct.pack("<IIIQ", frames.MAGIC, 0, 2**31, 0))
    with pytest.raises(InvalidArgument):
        frames.unpack_greeting(struct.pack("<IQQHH", frames.MAGIC, 0, 0, 60000, 0))


@pytest.mark.parametrize("name", [b"\xff", b"decode-\xc3", b"\xed\xa0\x80"])
def test_a_name_that_is_no_text_is_refused_not_repaired(name):
    with pytest.raises(InvalidArgument, match="no text"):
        frames.unpack_name(name)
