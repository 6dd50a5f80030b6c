"""What published records hold in a cache, in torch: values, places, and index keys that are mixed before."""

from __future__ import annotations

import pytest
import torch

from engine.cache.records import Record
from engine.families.mla.records import index_e8m0, index_fp8, latent_fp8
from engine.families.v4.records import row_fp8
from engine.families.v41.records import entry_record, index_record, window_record
from kernels.operands import IndexMixing
from kernels.reference.kv_record import Packed, Paged, pack
from kernels.reference.records import index_codes, index_values, packed, values_of


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


KINDS: dict[str, tuple[Record, int]] = {
    "V3.2": (latent_fp8(512, 64), 656),
    "V4": (row_fp8(512, 64), 576),  # and 8 of scales, which a cache keeps apart
    "V4.1's window": (window_record(512), 528),
    "V4.1's entry": (entry_record(512), 288),
    "V4.1's index key": (index_record(128), 68),
}


@pytest.mark.parametrize(("record", "size"), KINDS.values(), ids=KINDS)
def test_rows_become_the_contracts_records_and_come_back(record: Record, size: int) -> None:
    """Of the bytes that engines exchange; a number between two codes may fall to either."""
    values = random(64, record.width)
    values[3], values[5], values[7, ::16] = 0, values[5] * 1e4, 1e-7
    mine, apart = packed(values, size)
    canonical = record.pack(values)
    whole = mine if apart is None else torch.cat([mine, apart], 1)
    assert whole.shape == canonical.shape == (64, record.bytes)
    assert (whole == canonical).float().mean() > 0.99
    behind = None if apart is None else canonical[:, size:]
    assert torch.equal(values_of(canonical[:, :size], behind), record.unpack(canonical))
    assert torch.equal(values_of(mine, apart), record.unpack(whole))


@pytest.mark.parametrize("powers", [False, True])
def test_index_keys_are_mixed_and_have_one_scale(powers: bool) -> None:
    matrix = torch.linalg.qr(random(128, 128))[0]
    keys = random(32, 128)
    codes, scales = index_codes(keys, IndexMixing(matrix, powers))
    held = index_values(codes.view(torch.uint8), scales)
    record = (index_e8m0 if powers else index_fp8)(128)
    expected = record.unpack(record.pack(keys @ matrix.T))
    assert (held == expected).float().mean() > 0.97
    assert float((held - keys @ matrix.T).norm() / keys.norm()) < 0.04
    if powers:
        assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))


def test_rows_go_to_the_places_of_their_positions() -> None:
    """Pages of four; the second row is nobody's."""
    places = Paged(
        torch.tensor([5, -1, 0], dtype=torch.int32), torch.tensor([1, 0, 0], dtype=torch.int32),
        torch.tensor([[3, 0], [1, 2]], dtype=torch.int32),
    )  # fmt: skip
    assert places.slots(4).tolist() == [2 * 4 + 1, -1, 3 * 4]
    values, pages = random(3, 576), torch.full((4, 4 * 656), 0xA5, dtype=torch.uint8)
    pack(Packed.V32, values, places, pages, 4, None, None)
    rows = pages.view(16, 656)
    written = (rows != 0xA5).any(1).nonzero().flatten().tolist()
    assert written == [9, 12]
    assert torch.equal(rows[[9, 12]], packed(values[[0, 2]], 656)[0])


@pytest.mark.parametrize("kind", [Packed.V4, Packed.INDEX_E4M3])
def test_scales_may_stand_apart_from_the_records_of_a_page(kind: Packed) -> None:
    """The same bytes as behind them; rows of no sequence are not written."""
    layout, size = kind.value, 4 * kind.value.size
    values, places = random(3, layout.width), Paged(
        torch.tensor([5, 2, 0], dtype=torch.int32), torch.tensor([1, -1, 0], dtype=torch.int32),
        torch.tensor([[3, 0], [1, 2]], dtype=torch.int32),
    )  # fmt: skip
    behind = torch.full((4, size), 0xA5, dtype=torch.uint8)
    room = torch.full((4, size + 64), 0xA5, dtype=torch.uint8)
    pack(kind, values, places, behind, 4, None, None)
    pack(kind, values, places, room[:, : 4 * layout.row], 4, None, None, room[:, 4 * layout.row + 64 :])
    assert torch.equal(room[:, : 4 * layout.row], behind[:, : 4 * layout.row])
    assert torch.equal(room[:, 4 * layout.row + 64 :], behind[:, 4 * layout.row :])
    assert bool((room[:, 4 * layout.row : 4 * layout.row + 64] == 0xA5).all())
    assert (behind != 0xA5).any(1).tolist() == [False, False, True, True]
