"""Reads a family's tensors out of a folder, dequantized once, and accounts for every one. Knows no architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.formats import FormatError, fp4_packed, fp8_blocks, scale_values
from engine.checkpoint.progress import Meter, Progress
from engine.checkpoint.scales import FLOATS, INTEGERS, PACKED, block_scales, quantization, scale_name
from engine.checkpoint.table import RowTable, scaled_table
from engine.checkpoint.tensors import read, view
from kernels.operands import CPU
from kernels.reference.gemm import Fp4Weights, Fp8Weights

__all__ = ["Progress", "Reader"]
_BF16_HOLDS = frozenset({"BF16", *PACKED})  # FP4 times a power of two has two significant bits
_ANOTHER = "use the config.json that belongs to these weights"
_AGAIN = "download or convert the checkpoint again"


class Reader:
    """Tensors by their upstream names. `rename` maps a stored name to it; `finish` refuses what nobody asked for.

    What it returns is a copy on `device`, so that beside the model only the tensor in work is held of a file; tables
    stay there.
    """

    def __init__(
        self, folder: Folder, rename: Callable[[str], str], progress: Progress | None = None,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        self._folder, self._block, self._device = folder, quantization(folder.config).block, device
        self._stored: dict[str, str] = {}
        for stored in folder.names:
            name = rename(stored)
            if name in self._stored:
                message = f"stored twice, also as {self._stored[name]}"
                raise CheckpointError(message, file=folder.file(stored), item=stored, fix="keep one of the two")
            self._stored[name] = stored
        self._left = set(self._stored)
        self._meter = Meter(len(self._stored), sum(map(folder.num_bytes, folder.names)), progress)

    def has(self, prefix: str) -> bool:
        """Whether any tensor's name starts with `prefix`."""
        return any(name.startswith(prefix) for name in self._stored)

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        """A weight as fp32 of this shape, dequantized if it is stored quantized (its scale is `*.scale`)."""
        kind = self._fitting(name, shape)
        stored = self._take(name)
        weight = read(self._folder, stored)
        value = weight.to(torch.float32) if kind in FLOATS else self._dequantized(name, kind, weight)
        if not bool(torch.isfinite(value).all()):
            raise self._error(name, "holds NaN or infinity", _AGAIN)
        return value.to(self._device)

    def stack(self, names: Sequence[str], *shape: int, then: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Weights of one shape [len(names) + len(then), *shape], in bf16 where that holds every value, else fp32."""
        kinds = {self._fitting(name, shape) for name in names}  # all, before room for them is taken
        exact = kinds <= _BF16_HOLDS and all(torch.equal(weight.to(torch.bfloat16).float(), weight) for weight in then)
        dtype, count = torch.bfloat16 if exact else torch.float32, len(names) + len(then)
        stacked = torch.empty(count, *shape, dtype=dtype, device=self._device)
        for i, name in enumerate(names):
            stacked[i] = self.floats(name, *shape)
        for i, weight in enumerate(then, len(names)):
            stacked[i] = weight
        return stacked

    def block_kind(self, names: Sequence[str], *shape: int) -> type[Fp8Weights | Fp4Weights] | None:
        """What `blocks` would give of weights of one shape [out, in]; None where they are in no format that products
        are defined for (kernels/reference/gemm.py)."""
        kinds = {self._fitting(name, shape) for name in names}
        kind = kinds.pop() if len(kinds) == 1 else ""
        if kind not in ("F8_E4M3", *PACKED):
            return None
        stored = [self._at(scale_name(name)) for name in names]
        wanted = block_scales(kind in PACKED, self._block, shape, self._folder.stored(stored[0]))
        if wanted is None or any(self._folder.shape(scale) != wanted for scale in stored):
            return None
        return Fp4Weights if kind in PACKED else Fp8Weights

    def blocks(self, names: Sequence[str], *shape: int) -> Fp8Weights | Fp4Weights:
        """Weights of one shape [out, in] that have a `block_kind`, as they are stored: [len(names), out, in]."""
        kind = self.block_kind(names, *shape)
        assert kind is not None  # noqa: S101  the caller has asked
        codes: torch.Tensor | None = None
        scales: list[torch.Tensor] = []
        for number, name in enumerate(names):
            one, scale = self._stored_blocks(name)
            if codes is None:
                codes = torch.empty(len(names), *one.shape, dtype=one.dtype, device=self._device)
            codes[number] = one
            scales.append(scale)
        return kind(codes, torch.stack(scales).to(self._device))

    def integers(self, name: str, *shape: int, below: int) -> torch.Tensor:
        """An integer table as int64 of this shape with every value in 0 .. below - 1."""
        stored = self._take(name)
        kind, found = self._folder.stored(stored), self._folder.shape(stored)
        if kind not in INTEGERS or found != shape:
            raise self._error(name, f"{kind} {list(found)}, expected integers {list(shape)}", _ANOTHER)
        value = read(self._folder, stored)
        if bool((value < 0).any()) or bool((value >= below).any()):
            raise self._error(name, f"a value is not in 0 .. {below - 1}", "convert the checkpoint again")
        return value.to(self._device, torch.int64)

    def table(self, name: str, rows: int, width: int) -> RowTable:
        """A table that stays on disk, as plain floats or FP8 rows with one E8M0 scale per block (in `*.scale`)."""
        stored = self._take(name)
        kind, found = self._folder.stored(stored), self._folder.shape(stored)
        if found != (rows, width):
            raise self._error(name, f"shape {list(found)}, but the config asks for {[rows, width]}", _ANOTHER)
        weight = view(self._folder, stored)
        if kind in FLOATS:
            return RowTable(weight, None)
        if kind != "F8_E4M3":
            raise self._error(name, f"stored as {kind}, FP8 or floats are expected", "convert the checkpoint again")
        scale = scale_name(name)
        try:
            return scaled_table(weight, view(self._folder, self._take(scale)))
        except FormatError as error:
            raise self._error(scale, str(error), _AGAIN) from error

    def leave(self, *prefixes: str) -> None:
        """Tensors under these prefixes belong to a part that is not loaded here; `finish` passes over them."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def finish(self) -> None:
        """Raises CheckpointError for the first tensor that no part of the model took."""
        for name in sorted(self._left):
            message = f"unknown tensor ({len(self._left)} of them)"
            raise self._error(name, message, "remove it, or serve a model type that has it")

    def _fitting(self, name: str, shape: tuple[int, ...]) -> str:
        """The stored type of a weight that is there and has this shape."""
        stored = self._at(name)
        kind, found = self._folder.stored(stored), self._folder.shape(stored)
        if kind in INTEGERS:
            raise self._error(name, f"stored as {kind}, numbers are expected", "convert the checkpoint again")
        if len(found) == len(shape) == 2 and kind in PACKED:
            found = (found[0], found[1] * 2)
        if found != shape:
            raise self._error(name, f"shape {list(found)}, but the config asks for {list(shape)}", _ANOTHER)
        return kind

    def _at(self, name: str) -> str:
        """The stored name of a tensor that must be there."""
        if name not in self._stored:
            fix = "download the missing shard, or use the config.json that belongs to these weights"
            raise CheckpointError("the tensor is missing", file=self._folder.path, item=name, fix=fix)
        return self._stored[name]

    def _take(self, name: str) -> str:
        stored = self._at(name)
        self._left.discard(name)
        self._meter.add(self._folder.num_bytes(stored))
        return stored

    def _dequantized(self, name: str, kind: str, weight: torch.Tensor) -> torch.Tensor:
        scale_of = scale_name(name)
        scale = read(self._folder, self._take(scale_of))
        try:
            if kind != "F8_E4M3":
                return fp4_packed(weight, scale)
            if self._block is None:
                raise self._error(name, "is FP8, but config.json has no quantization_config", "restore config.json")
            return fp8_blocks(weight, scale, self._block)
        except FormatError as error:
            raise self._error(scale_of, str(error), _AGAIN) from error

    def _stored_blocks(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales; scales of squares of 128 as fp32."""
        scale_of = scale_name(name)
        codes, scales = read(self._folder, self._take(name)), read(self._folder, self._take(scale_of))
        try:
            values = scale_values(scales)
        except FormatError as error:
            raise self._error(scale_of, str(error), _AGAIN) from error
        if codes.dtype == torch.float8_e4m3fn and bool(codes.isnan().any()):
            raise self._error(name, "holds NaN or infinity", _AGAIN)
        squares = codes.dtype == torch.float8_e4m3fn and self._block == (128, 128)
        return codes, values if squares else scales

    def _error(self, name: str, message: str, fix: str) -> CheckpointError:
        return CheckpointError(message, file=self._folder.file(self._stored[name]), item=self._stored[name], fix=fix)
