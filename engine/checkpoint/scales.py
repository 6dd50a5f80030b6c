"""How many values share one scale: from the config's block size and the stored types and shapes. Reads no values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.header import Entry

FP4_GROUP = 32  # inputs that share one E8M0 scale
PACKED = ("I8", "U8")  # two FP4 values to a byte
FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("I32", "I64")
_KNOWN = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("ue8m0", "float"),
    "expert_dtype": ("fp4", "fp8"),
}
SCALE_TYPES = ("F8_E8M0", "U8", *FLOATS)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the config says about FP8 weights."""

    block: tuple[int, int] | None


def quantization(config: dict[str, Any]) -> Quantization:
    """The `quantization_config` of a model config. Raises CheckpointError if its block size is not two sizes."""
    settings = config.get("quantization_config")
    if not settings:
        return Quantization(None)
    if not isinstance(settings, dict):
        item, fix = "quantization_config", "restore config.json"
        raise CheckpointError(f"{settings!r} is not a section", file="config.json", item=item, fix=fix)
    for key, known in _KNOWN.items():
        if (given := settings.get(key)) is not None and given not in known:
            item, fix = f"quantization_config.{key}", f"convert the weights: {' or '.join(known)} is read here"
            raise CheckpointError(f"{given!r} is an unknown format", file="config.json", item=item, fix=fix)
    block = settings.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
        item, fix = "quantization_config.weight_block_size", "give two positive sizes, for example [128, 128]"
        raise CheckpointError(f"{block!r} is not a block size", file="config.json", item=item, fix=fix)
    return Quantization((block[0], block[1]))


def scale_name(weight: str) -> str:
    """The upstream name of a weight's scale."""
    return weight.removesuffix(".weight") + ".scale"


def is_quantized(entry: Entry) -> bool:
    """Whether a matrix of this type needs a scale beside it."""
    return len(entry.shape) == 2 and (entry.stored == "F8_E4M3" or entry.stored in PACKED)


def unit_of(weight: Entry, scale: Entry, block: tuple[int, int] | None) -> tuple[int, int]:
    """Rows and columns, in values, that share one scale. Raises ValueError, in words, if the two do not fit.

    FP4 has groups of 32 inputs, FP8 the config's blocks (the last may be ragged), or whole blocks of one row.
    """
    rows, columns = weight.shape
    if scale.stored not in SCALE_TYPES:
        raise ValueError(f"scales stored as {scale.stored}, expected one of {', '.join(SCALE_TYPES)}")
    if weight.stored in PACKED:
        wanted = (rows, -(-columns * 2 // FP4_GROUP))
        if scale.shape != wanted or scale.stored in FLOATS:
            raise ValueError(f"FP4 needs E8M0 scales {list(wanted)}, found {scale.stored} {list(scale.shape)}")
        return 1, FP4_GROUP
    if len(scale.shape) == 2 and rows == scale.shape[0] > 1 and scale.shape[1] and columns % scale.shape[1] == 0:
        return 1, columns // scale.shape[1]
    if block is None:
        raise ValueError("the weight is FP8, but config.json has no quantization_config")
    needed = (-(-rows // block[0]), -(-columns // block[1]))
    if scale.shape != needed:
        found = f"scales {list(scale.shape)} do not fit blocks of {list(block)}"
        raise ValueError(f"{found}: {list(needed)} are needed")
    return block


def block_scales(
    packed: bool, block: tuple[int, int] | None, shape: tuple[int, ...], stored: str
) -> tuple[int, int] | None:
    """The shape of the scales of a matrix [out, in] in a format that products are defined for, where it is in one:
    packed FP4, or FP8 in squares of 128, or of 32 with E8M0 scales. `stored`: the type of the scales."""
    rows, columns = shape
    exponents = stored in ("F8_E8M0", "U8")
    if packed:
        fits, unit = exponents and not rows % 64, (1, FP4_GROUP)
    else:
        fits, unit = block == (128, 128) or (block == (32, 32) and exponents), block or (1, 1)
        fits = fits and not rows % 8
    if not fits or columns % 128:
        return None
    return -(-rows // unit[0]), -(-columns // unit[1])
