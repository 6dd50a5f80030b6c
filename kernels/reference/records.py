"""Cached rows as published records, in torch: values into bytes and back. Formats: reference/kv_record.py.

What a record is, its bytes say: a latent of V3.2 has 656, a row of V4 576 (and 8 of scales apart), a window row of V4.1
528, its entry 288 and its index key 68. An index key of V3.2 and V4 is 128 E4M3 codes, mixed before
(kernels.operands.IndexMixing), and one fp32 scale. Scales that stand apart are in pages of their own: a block is then
cut entry by entry, and codes of a page lie as the kernels of index scores read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.operands import IndexMixing
from kernels.reference.cast import CastSpec, Code, Scale, cast_rows, decode, scale_values
from kernels.reference.kv_record import Packed, pack
from kernels.reference.sparse_decode import RecordKind, unpack

LATENT_BYTES = RecordKind.V32.value
INDEX_WIDTH = 128
_GROUP = 128
_PACKED = {kind.value.row: kind for kind in (Packed.V32, Packed.V4, Packed.V41_WINDOW, Packed.V41_ENTRY)}
_PACKED[Packed.V41_INDEX.value.row] = Packed.V41_INDEX
_ATTENDED = {656: RecordKind.V32, 576: RecordKind.V4, 528: RecordKind.V41_WINDOW, 288: RecordKind.V41_ENTRY}


def packed_kind(size: int) -> Packed:
    """What a row becomes where a record, without scales that stand apart, has `size` bytes."""
    return _PACKED[size]


def attended_kind(size: int) -> RecordKind:
    """What attention reads there."""
    return _ATTENDED[size]


def values_of(records: Tensor, scales: Tensor | None = None) -> Tensor:
    """uint8 [rows, bytes] -> fp32 [rows, channels]; `scales` [rows, ...] where they stand apart."""
    size = records.shape[1]
    if size == INDEX_WIDTH and scales is not None:
        return index_values(records, scales)
    if size == Packed.V41_INDEX.value.row:
        return decode(records[:, :64], records[:, 64:], Packed.V41_INDEX.value.spec).to(torch.float32)
    return unpack(_ATTENDED[size], records, 1, scales).to(torch.float32)


def packed(values: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """[rows, channels] -> their records uint8 [rows, size], and what stands apart uint8 [rows, 8], if anything does."""
    rows, kind = len(values), _PACKED[size]
    records = torch.empty(rows, size, dtype=torch.uint8, device=values.device)
    apart = None
    if kind.value.scale_at is None:
        apart = torch.empty(rows, kind.value.scale_bytes, dtype=torch.uint8, device=values.device)
    pack(kind, values.contiguous(), torch.arange(rows, device=values.device), records, 1, None, None, apart)
    return records, apart


def index_spec(mixing: IndexMixing) -> CastSpec:
    """How mixed keys and queries are cast."""
    return CastSpec(Code.E4M3, _GROUP, Scale.E8M0 if mixing.powers else Scale.FP32)


def index_codes(values: Tensor, mixing: IndexMixing) -> tuple[Tensor, Tensor]:
    """Keys or query heads [rows, 128], rotated -> their E4M3 codes [rows, 128] and scales fp32 [rows, 1]."""
    codes, scales = cast_rows(values @ mixing.matrix.T, index_spec(mixing))
    return codes, scale_values(scales).to(torch.float32)


def index_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes, as E4M3 or as bytes [rows, 128], and scales fp32 [rows, 1] -> fp32 [rows, 128], mixed."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32) * scales
