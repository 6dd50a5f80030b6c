"""Reads a family's tensors out of a folder, dequantized once, and accounts for every one. Knows no architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.formats import FormatError, fp4_packed, fp8_blocks
from engine.checkpoint.table import RowTable, scaled_table

Progress = Callable[[int, int], None]  # bytes read, bytes in all
_PLAIN = ("F32", "F16", "BF16")
_INTEGER = ("I32", "I64")


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the config says about FP8 weights."""

    block: tuple[int, int] | None


def quantization(config: dict[str, Any]) -> Quantization:
    """The `quantization_config` of a model config. Raises CheckpointError if its block size is not two sizes."""
    settings = config.get("quantization_config")
    if not settings:
        return Quantization(None)
    block = settings.get("weight_block_size") if isinstance(settings, dict) else None
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
        item, fix = "quantization_config.weight_block_size", "give two positive sizes, for example [128, 128]"
        raise CheckpointError(f"{block!r} is not a block size", file="config.json", item=item, fix=fix)
    return Quantization((block[0], block[1]))


class Reader:
    """Tensors by their upstream names. `rename` maps a stored name to it; `finish` refuses what nobody asked for."""

    def __init__(self, folder: Folder, rename: Callable[[str], str], progress: Progress | None = None) -> None:
        self._folder, self._progress = folder, progress
        self._quantization = quantization(folder.config)
        self._stored: dict[str, str] = {}
        for stored in folder.names:
            name = rename(stored)
            if name in self._stored:
                message = f"stored twice, also as {self._stored[name]}"
                raise CheckpointError(message, file=folder.file(stored), item=stored, fix="keep one of the two")
            self._stored[name] = stored
        self._left = set(self._stored)
        self._total, self._read = sum(map(folder.num_bytes, folder.names)), 0

    def has(self, prefix: str) -> bool:
        """Whether any tensor's name starts with `prefix`."""
        return any(name.startswith(prefix) for name in self._stored)

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        """A weight as fp32 of this shape, dequantized if it is stored quantized (its scale is `*.scale`)."""
        stored = self._take(name)
        kind, weight = self._folder.stored(stored), self._folder.tensor(stored)
        if kind in _PLAIN:
            value = weight.to(torch.float32)
        elif kind in _INTEGER:
            raise self._error(name, f"stored as {kind}, numbers are expected", "convert the checkpoint again")
        else:
            value = self._dequantized(name, kind, weight)
        if tuple(value.shape) != shape:
            message = f"shape {list(value.shape)}, but the config asks for {list(shape)}"
            raise self._error(name, message, "use the config.json that belongs to these weights")
        if not bool(torch.isfinite(value).all()):
            raise self._error(name, "holds NaN or infinity", "download or convert the checkpoint again")
        return value

    def integers(self, name: str, *shape: int, below: int) -> torch.Tensor:
        """An integer table as int64 of this shape with every value in 0 .. below - 1."""
        stored = self._take(name)
        value = self._folder.tensor(stored)
        if self._folder.stored(stored) not in _INTEGER or tuple(value.shape) != shape:
            message = f"{self._folder.stored(stored)} {list(value.shape)}, expected integers {list(shape)}"
            raise self._error(name, message, "use the config.json that belongs to these weights")
        if bool((value < 0).any()) or bool((value >= below).any()):
            raise self._error(name, f"a value is not in 0 .. {below - 1}", "convert the checkpoint again")
        return value.to(torch.int64).clone()

    def table(self, name: str, rows: int, width: int) -> RowTable:
        """A table that stays on disk, as plain floats or FP8 rows with one E8M0 scale per block (in `*.scale`)."""
        stored = self._take(name)
        kind, weight = self._folder.stored(stored), self._folder.tensor(stored)
        if tuple(weight.shape) != (rows, width):
            message = f"shape {list(weight.shape)}, but the config asks for {[rows, width]}"
            raise self._error(name, message, "use the config.json that belongs to these weights")
        if kind in _PLAIN:
            return RowTable(weight, None)
        if kind != "F8_E4M3":
            raise self._error(name, f"stored as {kind}, FP8 or floats are expected", "convert the checkpoint again")
        scale_name = name.removesuffix(".weight") + ".scale"
        try:
            return scaled_table(weight, self._folder.tensor(self._take(scale_name)))
        except FormatError as error:
            raise self._error(scale_name, str(error), "download or convert the checkpoint again") from error

    def leave(self, *prefixes: str) -> None:
        """Tensors under these prefixes belong to a part that is not loaded here; `finish` passes over them."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def finish(self) -> None:
        """Raises CheckpointError for the first tensor that no part of the model took."""
        for name in sorted(self._left):
            message = f"unknown tensor ({len(self._left)} of them)"
            raise self._error(name, message, "remove it, or serve a model type that has it")

    def _take(self, name: str) -> str:
        if name not in self._stored:
            fix = "download the missing shard, or use the config.json that belongs to these weights"
            raise CheckpointError("the tensor is missing", file=self._folder.path, item=name, fix=fix)
        self._left.discard(name)
        stored = self._stored[name]
        self._read += self._folder.num_bytes(stored)
        if self._progress:
            self._progress(self._read, self._total)
        return stored

    def _dequantized(self, name: str, kind: str, weight: torch.Tensor) -> torch.Tensor:
        scale_name = name.removesuffix(".weight") + ".scale"
        scale = self._folder.tensor(self._take(scale_name))
        try:
            if kind != "F8_E4M3":
                return fp4_packed(weight, scale)
            if self._quantization.block is None:
                raise self._error(name, "is FP8, but config.json has no quantization_config", "restore config.json")
            return fp8_blocks(weight, scale, self._quantization.block)
        except FormatError as error:
            raise self._error(scale_name, str(error), "download or convert the checkpoint again") from error

    def _error(self, name: str, message: str, fix: str) -> CheckpointError:
        return CheckpointError(message, file=self._folder.file(self._stored[name]), item=self._stored[name], fix=fix)
