"""A folder as one rank holds it: the part of every stored tensor, weights and scales together. Reads headers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.rank import CannotSplit, Part, Rank, Rule, Split, expert_of, part_of, share, split_of
from engine.checkpoint.scales import PACKED, is_quantized, quantization, scale_name, unit_of

_ANOTHER = "use the config.json that belongs to these weights"


@dataclass(frozen=True, slots=True)
class Naming:
    """A family's tensor names. `upstream` maps a stored name; a name without a rule is not the family's."""

    upstream: Callable[[str], str]
    rules: tuple[Rule, ...]

    def stored(self, folder: Folder) -> dict[str, str]:
        """Upstream name -> stored name. Raises CheckpointError for a tensor that is stored under two names."""
        found: dict[str, str] = {}
        for name in folder.names:
            if (first := found.setdefault(self.upstream(name), name)) != name:
                message = f"stored twice, also as {first}"
                raise CheckpointError(message, file=folder.file(name), item=name, fix="keep one of the two")
        return found


def experts_of(config: dict[str, Any]) -> int:
    """Routed experts of a model. Raises CheckpointError naming the key."""
    text = config.get("text_config", config)
    found = text.get("n_routed_experts") if isinstance(text, dict) else None
    if type(found) is not int or found < 1:
        message = f"{found!r} is not a positive integer"
        raise CheckpointError(message, file="config.json", item="n_routed_experts", fix="restore config.json")
    return found


def parts(folder: Folder, naming: Naming, rank: Rank) -> dict[str, Part]:
    """Stored name -> the part that `rank` holds; tensors of other ranks' experts are left out.

    Raises CheckpointError naming file and tensor for a name that the family does not have, for scales that do not fit
    their weight, and for a tensor that does not divide into whole blocks.
    """
    stored = naming.stored(folder)
    block, experts = quantization(folder.config).block, experts_of(folder.config)
    mine = share(experts, rank.expert_rank, rank.expert_ranks)
    found: dict[str, Part] = {}
    for name, at in stored.items():
        split, expert = split_of(name, naming.rules), expert_of(name)
        is_scale = name.endswith(".scale") and split is not Split.WHOLE
        if split is None or (expert is not None and expert >= experts):
            raise _error(folder, at, "unknown tensor: this model type has none of that name", _ANOTHER)
        if is_scale and (weight := name.removesuffix(".scale") + ".weight") not in stored:
            message, fix = "the tensor is missing, its scale is there", "download the missing shard"
            raise CheckpointError(message, file=folder.path, item=weight, fix=fix)
        if not is_scale and (split is not Split.EXPERT or expert in mine):
            found |= _pair(folder, stored, name, split, block, rank)
    return found


def part_bytes(folder: Folder, name: str, part: Part) -> int:
    """Stored bytes of a part."""
    entry = folder.entry(name)
    if not entry.shape or not entry.num_bytes:
        return entry.num_bytes
    row = entry.num_bytes // entry.shape[0]
    return len(part.rows) * (row if part.columns is None else row // entry.shape[1] * len(part.columns))


def _pair(
    folder: Folder, stored: dict[str, str], name: str, split: Split, block: tuple[int, int] | None, rank: Rank
) -> dict[str, Part]:
    """The parts of a weight and, where it has one, of its scale."""
    weight, scale = stored[name], stored.get(scale_name(name))
    entry, unit, packed = folder.entry(weight), (1, 1), 1
    if scale is not None and is_quantized(entry):
        packed = 2 if entry.stored in PACKED else 1
        try:
            unit = unit_of(entry, folder.entry(scale), block)
        except ValueError as error:
            raise _error(folder, scale, str(error), _ANOTHER) from error
    shape = (*entry.shape[:-1], entry.shape[-1] * packed) if entry.shape else ()
    try:
        part = part_of(weight, split, shape, unit, rank)
    except CannotSplit as error:
        raise _error(folder, weight, error.message, error.fix) from error
    found = {weight: _scaled(part, (1, packed))}
    if scale is not None:
        found[scale] = _scaled(part, unit)
    return found


def _scaled(part: Part, unit: tuple[int, int]) -> Part:
    """The same part counted in units."""
    rows, columns = part.rows, part.columns
    return Part(_units(rows, unit[0]), None if columns is None else _units(columns, unit[1]))


def _units(values: range, unit: int) -> range:
    """A ragged last unit counts as one."""
    return range(values.start // unit, -(-values.stop // unit))


def _error(folder: Folder, stored: str, message: str, fix: str) -> CheckpointError:
    return CheckpointError(message, file=folder.file(stored), item=stored, fix=fix)
