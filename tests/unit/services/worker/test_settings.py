"""What waits for a kvstore is no stall, however long it may wait."""

from __future__ import annotations

import pytest

from services.prefill.settings import PrefillSettings


@pytest.mark.parametrize("hold_s", [0.5, 10.0, 300.0])
def test_a_worker_is_stuck_only_after_what_may_be_held_for_a_kvstore(hold_s: float) -> None:
    settings = PrefillSettings(store_hold_s=hold_s)
    assert settings.wedged_s >= hold_s + settings.stall_s
    assert PrefillSettings(store_hold_s=hold_s, kvstore=False).wedged_s == settings.stall_s
