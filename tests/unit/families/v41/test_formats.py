"""V4.1's number formats and canonical records, bit by bit, and the sizes its publication gives for them."""

from __future__ import annotations

import pytest
import torch

from engine.cache.records.blocks import ENTRY_FP4, INDEX_FP4, WINDOW_FP8, BlockFormat
from engine.families.v41.config import parse
from engine.families.v41.records import (
    entry_record,
    global_bytes_per_token,
    index_record,
    window_bytes_per_sequence,
    window_record,
)
from tests.unit.families.v41.material import DATA, flash_config, tensors

CASES = [
    ("fp8_block32", "fp8_scale", WINDOW_FP8),
    ("fp4_block16_e4m3", "fp4_e4m3_scale", ENTRY_FP4),
    ("fp4_block32_e8m0", "fp4_e8m0_scale", INDEX_FP4),
]


@pytest.mark.parametrize(("values", "scales", "form"), CASES)
def test_values_and_scales_equal_the_reference_bit_for_bit(values: str, scales: str, form: BlockFormat) -> None:
    cases = tensors(DATA / "quant-cases.safetensors")
    codes, bytes_of_scales = form.encode(cases["x"])
    assert torch.equal(form.decode(codes, bytes_of_scales), cases[values])
    assert torch.equal(form.scale_value(bytes_of_scales), cases[scales])


@pytest.mark.parametrize("form", [WINDOW_FP8, ENTRY_FP4, INDEX_FP4])
def test_what_a_format_holds_it_gives_back_unchanged(form: BlockFormat) -> None:
    once = form.rounded(torch.randn(50, 96, generator=torch.Generator().manual_seed(1)) * 3)
    assert torch.equal(form.rounded(once), once)


def test_a_width_that_is_no_whole_block_is_left_alone() -> None:
    odd = torch.randn(4, 40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(WINDOW_FP8.rounded(odd), odd)


@pytest.mark.parametrize(
    ("record", "width", "size"), [(window_record, 512, 528), (entry_record, 512, 288), (index_record, 128, 68)]
)
def test_records_have_the_published_sizes_and_lose_nothing_they_can_hold(record, width: int, size: int) -> None:
    kind = record(width)
    values = kind.format.rounded(torch.randn(7, width, generator=torch.Generator().manual_seed(3)))
    packed = kind.pack(values)
    assert (kind.bytes, packed.shape, packed.dtype) == (size, (7, size), torch.uint8)
    assert torch.equal(kind.unpack(packed), values)
    with pytest.raises(ValueError, match=kind.version):
        kind.pack(values[:, 1:])
    with pytest.raises(ValueError, match=kind.version):
        kind.unpack(packed[:, 1:])


def test_the_first_channel_is_the_low_nibble_and_scales_come_last() -> None:
    values = torch.zeros(1, 16)
    values[0, 0], values[0, 1] = 6.0, -0.5
    assert entry_record(16).pack(values).tolist() == [[0x9 << 4 | 0x7, 0, 0, 0, 0, 0, 0, 0, 0x38]]  # e4m3 0x38 is 1


def test_a_record_of_broken_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks of 32"):
        window_record(40)


def test_published_cache_sizes_follow_from_the_published_config() -> None:
    config = parse(flash_config())
    assert global_bytes_per_token(config) == 890
    assert window_bytes_per_sequence(config) == 40 * 67_584
