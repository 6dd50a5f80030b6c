"""A large stored table whose rows are dequantized as they are read. Knows rows and scales, not what they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from engine.checkpoint.formats import FormatError, powers_of_two

_CHECKED_AT_ONCE = 1 << 24  # scale bytes


@dataclass(frozen=True, slots=True)
class RowTable:
    """Views of the mapped file: only the pages of rows that are asked for are ever read."""

    weight: torch.Tensor  # [rows, width] as stored
    scale: torch.Tensor | None  # uint8 E8M0 [rows, width / block], for FP8 rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and scales."""
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def for_device(self, device: torch.device) -> RowTable:
        """The table as `rows` reads it on `device`: a GPU reads the host's memory, where it then lies pinned."""
        if device.type == "cpu":
            return self
        return RowTable(_pinned(self.weight, device), None if self.scale is None else _pinned(self.scale, device))

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """fp32 [*numbers, width] of the rows `numbers` (int64, any shape)."""
        flat = numbers.reshape(-1)
        if self.scale is None:
            return self.weight[flat].to(torch.float32).view(*numbers.shape, -1)
        stored = self.weight.view(torch.uint8)[flat].view(torch.float8_e4m3fn).to(torch.float32)
        scales = powers_of_two(self.scale[flat])
        values = stored.view(len(flat), scales.shape[1], -1) * scales[..., None]
        return values.view(*numbers.shape, -1)


def may_be_pinned(nbytes: int) -> bool:
    """Whether the host would still have half of its memory."""
    return 2 * nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class _Held:
    """Pinned memory under the name that a GPU reads it by: the same address. torch keeps this with what it makes."""

    bytes: torch.Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": tuple(self.bytes.shape), "typestr": "|u1", "data": (self.bytes.data_ptr(), False), "version": 3,
        }  # fmt: skip


def _pinned(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    held = _Held(rows.contiguous().view(torch.uint8).pin_memory())
    return torch.as_tensor(held, device=device).view(rows.dtype)


def scaled_table(weight: torch.Tensor, scale: torch.Tensor) -> RowTable:
    """FP8 rows with E8M0 scales. Raises FormatError unless every row has whole blocks and no scale is NaN."""
    fits = scale.dtype == torch.uint8 and scale.dim() == 2 and len(scale) == len(weight) and scale.shape[1]
    if not fits or weight.shape[1] % scale.shape[1]:
        raise FormatError(f"scales {scale.dtype} {list(scale.shape)} do not fit rows {list(weight.shape)}")
    for part in scale.split(max(1, _CHECKED_AT_ONCE // scale.shape[1])):
        if bool((part == 255).any()):
            raise FormatError("a scale is NaN")
    return RowTable(weight, scale)
