"""What becomes of bytes that were cut, damaged, repeated, reordered or never sent by anybody."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, well: st.SearchStrategy[bytes]) -> bytes:
    """Something `well` draws that is not any more what its sender sent, or never was."""
    message, other = draw(well), draw(well)
    at, to = sorted(draw(st.tuples(st.integers(0, len(message)), st.integers(0, len(message)))))
    return draw(
        st.sampled_from(
            [
                message[:at],
                message[at:],
                message[:at] + message[to:],
                message + message,
                message + other,
                message[:at] + other,
                message[:at] + message[at:to] * 2 + message[to:],
                message[to:] + message[:to],
                message[:at] + bytes(byte ^ 0xFF for byte in message[at:to]) + message[to:],
                bytes([draw(st.integers(0, 255))]) + message[1:],
                draw(st.binary(max_size=80)),
            ]
        )
    )
