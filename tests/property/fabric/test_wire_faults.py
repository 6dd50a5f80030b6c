"""Messages and frames that were cut, damaged, repeated, reordered or made up are refused (promise 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from fabric.errors import ServiceError
from fabric.kvlink import messages
from fabric.kvlink import tcp_frames as frames
from fabric.kvlink.credit import Run
from fabric.kvlink.extents import Extents
from fabric.kvlink.messages import Chunk, Credit, GaveUp, Refusal
from fabric.kvlink.tcp_frames import Answer, Greeting
from fabric.records import LinkAddress
from services.worker.notices import HandoffNotice
from tests.support.damage import damaged
from tests.support.promises import Recorder

EXAMPLES = 20_000
U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
NAMES = st.text("abcdefgh-0123456789", min_size=1, max_size=12)
ROWS = st.lists(st.tuples(NAMES, U32, U32, U64, U64, U64), max_size=4).map(tuple)
REPLIES = st.none() | st.builds(LinkAddress, NAMES, NAMES, U64, st.binary(max_size=20))
CHUNKS = st.builds(Chunk, NAMES, U64, st.builds(Run, U64, U64, U64), st.booleans(), ROWS.map(Extents.of), REPLIES)
COPIES = st.lists(st.tuples(U32, U32, U32), max_size=4)

WELL = st.one_of(
    CHUNKS.map(Chunk.pack),
    st.builds(GaveUp, NAMES).map(GaveUp.pack),
    st.builds(Credit, NAMES, U64).map(Credit.pack),
    st.builds(Refusal, NAMES, NAMES, NAMES).map(Refusal.pack),
    st.builds(HandoffNotice, NAMES, st.booleans()).map(HandoffNotice.dump),
    st.builds(Greeting, U64, U64, NAMES, NAMES).map(Greeting.pack),
    st.sampled_from(Answer).map(frames.pack_answer),
    st.builds(
        lambda copies, notice: frames.pack_push(np.array(copies, np.int64).reshape(-1, 3), notice),
        *(COPIES, st.binary(max_size=20)),
    ),
)


def message(payload: bytes) -> bytes:
    return messages.unpack(payload).pack()


def notice(payload: bytes) -> bytes | None:
    read = HandoffNotice.load(payload)
    return None if read is None else read.dump()


def greeting(payload: bytes) -> bytes | None:
    """As the transport reads it: a head, then names as long as it says. Whoever has no text for a name is nobody."""
    writer_epoch, target_epoch, writer, target = frames.unpack_greeting(payload[: frames.GREETING_BYTES])
    names = payload[frames.GREETING_BYTES :]
    if len(names) != writer + target:
        return None
    return Greeting(
        writer_epoch, target_epoch, frames.unpack_name(names[:writer]), frames.unpack_name(names[writer:])
    ).pack()


def push(payload: bytes) -> bytes | None:
    copies, notice_bytes, payload_bytes = frames.unpack_push(payload[: frames.PUSH_BYTES])
    body = payload[frames.PUSH_BYTES :]
    if len(body) != copies * frames.COPY_BYTES + notice_bytes:
        return None
    table = frames.unpack_copies(body[: copies * frames.COPY_BYTES])
    if int(table[:, 2].sum()) != payload_bytes:
        return None
    return frames.pack_push(table, body[copies * frames.COPY_BYTES :])


def answer(payload: bytes) -> bytes:
    return frames.pack_answer(frames.unpack_answer(payload))


READERS: list[tuple[Callable[[bytes], bytes | None], int]] = [
    (message, 0),
    (notice, 0),
    (greeting, frames.GREETING_BYTES),
    (push, frames.PUSH_BYTES),
    (answer, frames.ANSWER_BYTES),
]


@pytest.mark.slow
@pytest.mark.promise(3)
def test_what_is_no_message_is_refused_by_every_reader(promise: Recorder) -> None:
    """Accepted wrongly: read as a message whose bytes are others. A transport never reads less than a frame's head."""
    ends, runs = Counter[str](), count()

    @seed(3)
    @settings(max_examples=EXAMPLES, database=None)
    @given(damaged(WELL))
    def feed(payload: bytes) -> None:
        next(runs)
        for read, head in READERS:
            if (head and len(payload) < head) or (read is answer and len(payload) != head):
                continue
            try:
                again = read(payload)
            except ServiceError:
                ends["refused"] += 1
            except Exception as error:  # what nobody expects is what is looked for
                ends[f"foreign exception {type(error).__name__}"] += 1
                print(read.__name__, payload, repr(error))
            else:
                kind = "refused" if again is None else "valid" if again == payload else "wrong"
                ends[kind] += 1
                if kind == "wrong":
                    print(read.__name__, payload, again)

    feed()
    print(dict(ends))
    foreign = sum(number for end, number in ends.items() if end.startswith("foreign"))
    promise(3, "examples of cut, damaged, repeated, reordered and foreign bytes", next(runs), at_least=EXAMPLES)
    promise(3, "exceptions that are no domain error", foreign, exactly=0)
    promise(3, f"accepted wrongly, of {ends.total()} readings", ends["wrong"], exactly=0)
    assert ends["valid"] < ends.total() / 2
