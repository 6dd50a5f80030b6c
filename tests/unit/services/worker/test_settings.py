"""What waits for a kvstore is no stall, however long it may wait."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.prefill.settings import PrefillSettings


@pytest.mark.parametrize("hold_s", [0.5, 10.0, 300.0])
def test_a_worker_is_stuck_only_after_what_may_be_held_for_a_kvstore(hold_s: float) -> None:
    settings = PrefillSettings(store_hold_s=hold_s)
    assert settings.wedged_s >= hold_s + settings.stall_s
    assert PrefillSettings(store_hold_s=hold_s, kvstore=False).wedged_s == settings.stall_s


@pytest.mark.parametrize(
    ("given", "dtype"),
    [({}, "float32"), ({"device": "cuda:1"}, "bfloat16"), ({"device": "cuda", "dtype": "float32"}, "float32")],
)
def test_a_gpu_computes_in_bfloat16_unless_told_otherwise(given: dict[str, str], dtype: str) -> None:
    settings = PrefillSettings(**given)
    config = settings.engine_config()
    assert (config.dtype, config.device) == (dtype, settings.device)


def test_a_device_of_no_such_name_is_refused_before_any_work() -> None:
    with pytest.raises(ValidationError, match="device"):
        PrefillSettings(device="gpu0")
