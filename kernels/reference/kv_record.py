"""Packing of KV records and index keys in torch: norm, rope, cast, and where each byte goes.

A row of x becomes one record in the slot page * page_tokens + place, negative slots none. Latents are normed over 512
channels (index keys over 128), turned in their last channels, then cast as reference/cast.py says; bf16 channels are
rounded. Formats: reference/sparse_decode.py. An index key is 128 E4M3 codes and an fp32 scale (132 bytes) or 128 E2M1
codes and 4 E8M0 scales (68); the scales stand behind the codes of the page's keys, as those of V4's records do, or
where `apart` is: uint8 [pages, bytes], as far apart as the pages. V4.1's index key has its own behind its codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.cast import CastSpec, Code, Scale, cast_rows
from kernels.reference.norm import rotate
from kernels.reference.rms_norm import check_rows, rms_norm


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes of a record: codes of the first `cast` channels at 0 of its row; bf16 of the last `plain` at `plain_at`;
    `scale_bytes` at `scale_at`, or behind the page's rows where that is None."""

    row: int
    cast: int
    spec: CastSpec
    scale_bytes: int
    scale_at: int | None = None
    plain: int = 0
    plain_at: int = 0

    @property
    def width(self) -> int:
        """Channels."""
        return self.cast + self.plain

    @property
    def size(self) -> int:
        """Bytes of a record in all."""
        return self.row + (self.scale_bytes if self.scale_at is None else 0)

    @property
    def normed(self) -> int:
        """Channels that the norm takes: those of V3.2's key that turn stand apart."""
        return min(self.width, 512)


class Packed(Enum):
    """What a row becomes."""

    V4 = Layout(576, 448, CastSpec(Code.E4M3, 64, Scale.E8M0), 8, None, 64, 448)
    V32 = Layout(656, 512, CastSpec(Code.E4M3, 128, Scale.FP32), 16, 512, 64, 528)
    V41_WINDOW = Layout(528, 512, CastSpec(Code.E4M3, 32, Scale.E8M0), 16, 512)
    V41_ENTRY = Layout(288, 512, CastSpec(Code.E2M1, 16, Scale.E4M3), 32, 256)
    INDEX_E4M3 = Layout(128, 128, CastSpec(Code.E4M3, 128, Scale.FP32), 4)
    INDEX_E2M1 = Layout(64, 128, CastSpec(Code.E2M1, 32, Scale.E8M0), 4)
    V41_INDEX = Layout(68, 128, CastSpec(Code.E2M1, 32, Scale.E8M0), 4, 64)


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """Slots by position: row i is token positions[i] of the sequence whose pages are tables[sequences[i]].

    int32 [rows], [rows] and [sequences, pages]; a negative position or sequence is no row's.
    """

    positions: Tensor
    sequences: Tensor
    tables: Tensor

    def slots(self, page_tokens: int) -> Tensor:
        """int64 [rows]."""
        at = self.positions.long().clamp_min(0)
        pages = self.tables[self.sequences.long().clamp_min(0), at // page_tokens].long()
        nobody = (self.positions < 0) | (self.sequences < 0)
        return torch.where(nobody, -1, pages * page_tokens + at % page_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """weight fp32 [512 or 128]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """positions int32 [rows]; cosine and sine fp32 [positions, pairs] of the last 2 * pairs channels."""

    positions: Tensor
    cosine: Tensor
    sine: Tensor


def pack(
    kind: Packed, x: Tensor, slots: Tensor | Paged, pages: Tensor, page_tokens: int, norm: Norm | None,
    turn: Turn | None, apart: Tensor | None = None,
) -> None:  # fmt: skip
    """Write rows of x [rows, width] into pages uint8 [pages, bytes] at slots int64 [rows], or where `Paged` says."""
    slots = slots.slots(page_tokens) if isinstance(slots, Paged) else slots
    layout, kept = kind.value, slots >= 0
    values = prepared(kind, x, norm, turn)[kept].to(torch.float32)
    codes, scales = cast_rows(values[:, : layout.cast], layout.spec)
    page, place = slots[kept] // page_tokens, slots[kept] % page_tokens
    rows = pages[:, : page_tokens * layout.row].unflatten(1, (page_tokens, layout.row))
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8).flatten(1)
    scales = torch.nn.functional.pad(scales, (0, layout.scale_bytes - scales.shape[1]))
    rows[page, place, : codes.shape[1]] = codes
    if layout.plain:
        plain = values[:, layout.cast :].to(torch.bfloat16).view(torch.uint8)
        rows[page, place, layout.plain_at : layout.plain_at + 2 * layout.plain] = plain
    if layout.scale_at is not None:
        rows[page, place, layout.scale_at : layout.scale_at + layout.scale_bytes] = scales
        return
    behind = pages[:, page_tokens * layout.row : page_tokens * layout.size] if apart is None else apart
    behind.unflatten(1, (page_tokens, layout.scale_bytes))[page, place] = scales


def prepared(kind: Packed, x: Tensor, norm: Norm | None, turn: Turn | None) -> Tensor:
    """The normed and turned rows, float64."""
    values, normed = x.double(), kind.value.normed
    if norm is not None:
        values = torch.cat([rms_norm(values[:, :normed], norm.weight, norm.eps), values[:, normed:]], 1)
    if turn is not None:
        at = turn.positions.long()
        values = rotate(values, turn.cosine.double()[at], turn.sine.double()[at])
    return values


def check_pack(
    kind: Packed, x: Tensor, slots: Tensor | Paged, pages: Tensor, page_tokens: int, norm: Norm | None,
    turn: Turn | None, apart: Tensor | None = None,
) -> None:  # fmt: skip
    """Raises KernelError naming the first operand that no implementation takes. Slots beyond the pages and slots that
    two rows share are the caller's mistake."""
    layout = kind.value
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise KernelError(f"x is {x.dtype}", fix="pass bf16 or fp32")
    check_rows("x", x, (x.shape[0], layout.width), x.dtype)
    _check_slots(slots, x.shape[0])
    check_rows("pages", pages, tuple(pages.shape), torch.uint8)
    size = page_tokens * (layout.size if apart is None else layout.row)
    if page_tokens < 1 or pages.shape[1] < size or pages.stride(0) % 16 or pages.data_ptr() % 16:
        raise KernelError(
            f"pages of {pages.shape[1]} bytes, {pages.stride(0)} apart, for {page_tokens} records of {layout.size}",
            fix="pad pages to a multiple of 16 bytes that holds their records",
        )
    if apart is not None:
        _check_scales(layout, pages, page_tokens, apart)
    elif layout.scale_at is None and layout.spec.scale is Scale.FP32 and page_tokens * layout.row % 4:
        raise KernelError(f"{page_tokens} rows of {layout.row} bytes", fix="use rows that end at multiples of 4 bytes")
    if norm is not None:
        check_rows("norm.weight", norm.weight, (layout.normed,), torch.float32)
    if turn is not None:
        check_rows("turn.positions", turn.positions, (x.shape[0],), torch.int32)
        wide = 2 * turn.cosine.shape[1]
        if wide & (wide - 1) or not 4 <= wide <= (layout.plain or layout.cast):
            raise KernelError(f"{wide} channels that turn", fix="use a power of two, at most 64 where 64 are plain")
        for name, table in (("cosine", turn.cosine), ("sine", turn.sine)):
            check_rows(f"turn.{name}", table, tuple(turn.cosine.shape), torch.float32)
            if not table.is_contiguous():
                raise KernelError(f"turn.{name} is not contiguous", fix="pass a contiguous table")


def _check_scales(layout: Layout, pages: Tensor, page_tokens: int, scales: Tensor) -> None:
    check_rows("scales", scales, tuple(scales.shape), torch.uint8)
    unlike = scales.stride(0) != pages.stride(0) or (scales.data_ptr() - pages.data_ptr()) % 4
    if layout.scale_at is not None or unlike or scales.shape[1] < page_tokens * layout.scale_bytes:
        message = f"scales of {scales.shape[1]} bytes, {scales.stride(0)} apart"
        raise KernelError(message, fix="pass them for records whose scales stand apart, in the storage of the pages")


def _check_slots(slots: Tensor | Paged, rows: int) -> None:
    if not isinstance(slots, Paged):
        check_rows("slots", slots, (rows,), torch.int64)
        return
    for name, tensor in (("positions", slots.positions), ("sequences", slots.sequences)):
        check_rows(f"slots.{name}", tensor, (rows,), torch.int32)
    check_rows("slots.tables", slots.tables, tuple(slots.tables.shape), torch.int32)
