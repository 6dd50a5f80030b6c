"""Cached rows as published records, in torch: values into bytes and back. Formats: reference/kv_record.py.

V3.2's latents are records of 656 bytes. An index key is 128 E4M3 codes, mixed before (kernels.operands.IndexMixing),
and one fp32 scale, which stands in pages of its own: codes of a page then lie as the kernels of index scores read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.operands import IndexMixing
from kernels.reference.cast import CastSpec, Code, Scale, cast_rows, scale_values
from kernels.reference.kv_record import Packed, pack
from kernels.reference.sparse_decode import RecordKind, unpack

LATENT_BYTES = RecordKind.V32.value
INDEX_WIDTH = 128
_GROUP = 128


def latents(records: Tensor) -> Tensor:
    """uint8 [rows, 656] -> fp32 [rows, 576]."""
    return unpack(RecordKind.V32, records, 1).to(torch.float32)


def packed_latents(values: Tensor) -> Tensor:
    """[rows, 576], normed and rotated -> uint8 [rows, 656]."""
    rows = len(values)
    records = torch.empty(rows, LATENT_BYTES, dtype=torch.uint8, device=values.device)
    pack(Packed.V32, values.contiguous(), torch.arange(rows, device=values.device), records, 1, None, None)
    return records


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
