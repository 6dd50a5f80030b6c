"""What published records hold in a cache, in torch: values, places, and index keys that are mixed before."""

from __future__ import annotations

import pytest
import torch

from engine.families.mla.records import index_e8m0, index_fp8, latent_fp8
from kernels.operands import IndexMixing
from kernels.reference.kv_record import Packed, Paged, pack
from kernels.reference.records import index_codes, index_values, latents, packed_latents


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_latents_are_the_contracts_records() -> None:
    """Of the bytes that engines exchange; a number between two codes may fall to either."""
    values = random(64, 576)
    mine, canonical = packed_latents(values), latent_fp8(512, 64).pack(values)
    assert mine.shape == canonical.shape == (64, 656)
    assert (mine == canonical).float().mean() > 0.99
    assert torch.equal(latents(canonical), latent_fp8(512, 64).unpack(canonical))


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
    assert torch.equal(rows[[9, 12]], packed_latents(values[[0, 2]]))
