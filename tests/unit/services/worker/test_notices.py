"""A notice survives its bytes, and foreign bytes are no notice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.notices import MAX_ID_BYTES, HandoffNotice

IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=MAX_ID_BYTES)


@given(IDS, st.booleans())
def test_a_notice_comes_back_from_its_bytes(handoff_id: str, last: bool) -> None:
    notice = HandoffNotice(handoff_id, last)
    assert HandoffNotice.load(notice.dump()) == notice


@given(st.binary(max_size=2 * MAX_ID_BYTES))
def test_any_bytes_are_a_notice_or_nothing(payload: bytes) -> None:
    notice = HandoffNotice.load(payload)
    assert notice is None or notice.dump() == payload
