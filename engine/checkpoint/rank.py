"""Which part of each tensor one rank of an expert and tensor parallel model holds. Arithmetic on names and shapes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from engine.errors import EngineError, InvalidParameter

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Split(Enum):
    """How ranks divide a tensor; the value is what a report calls it."""

    WHOLE = "on every rank"
    ROWS = "rows, by tensor rank"
    COLUMNS = "columns, by tensor rank"
    TABLE = "rows looked up one by one, by tensor rank"  # shares may differ by one row
    EXPERT = "whole experts, by expert rank"


class CannotSplit(EngineError):
    """A tensor that cannot be divided as asked. `field` is its name."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank: `expert_rank` of `expert_ranks` for routed experts, `tensor_rank` of `tensor_ranks` for the rest."""

    expert_rank: int = 0
    expert_ranks: int = 1
    tensor_rank: int = 0
    tensor_ranks: int = 1

    def __post_init__(self) -> None:
        for kind in ("expert", "tensor"):
            rank, ranks = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_ranks")
            if ranks < 1:
                raise InvalidParameter(f"{kind}_ranks", f"{ranks} is not positive", "use at least 1")
            if not 0 <= rank < ranks:
                raise InvalidParameter(f"{kind}_rank", f"{rank} is not in 0 .. {ranks - 1}", "count ranks from 0")


@dataclass(frozen=True, slots=True)
class Rule:
    """Upstream tensor names that match `pattern` are divided by `split`; a scale goes with its weight."""

    pattern: str
    split: Split


@dataclass(frozen=True, slots=True)
class Part:
    """Rows and columns of a tensor; `columns` None: all of each row."""

    rows: range
    columns: range | None = None


def split_of(name: str, rules: Sequence[Rule]) -> Split | None:
    """What the first matching rule says of an upstream name; None if the family has no such tensor."""
    return _split(_NUMBER.sub("0", name), tuple(rules))


@lru_cache(maxsize=4096)
def _split(name: str, rules: tuple[Rule, ...]) -> Split | None:
    """For the names of all layers and experts at once: rules ask for no particular one."""
    return next((rule.split for rule in rules if re.search(rule.pattern, name)), None)


def expert_of(name: str) -> int | None:
    """The number of the routed expert that a tensor belongs to."""
    found = _EXPERT.search(name)
    return int(found[1]) if found else None


def share(count: int, rank: int, ranks: int) -> range:
    """The run of `count` things that rank `rank` has; all runs follow one another and differ by at most one."""
    return range(rank * count // ranks, (rank + 1) * count // ranks)


def part_of(name: str, split: Split, shape: tuple[int, ...], unit: tuple[int, int], rank: Rank) -> Part:
    """The part that `rank` holds of a tensor that is not an expert's, in values.

    `unit`: rows and columns that share a scale, (1, 1) where there is none; a part holds whole units only. Raises
    CannotSplit, naming the tensor, if the dimension does not divide into as many such parts.
    """
    rows = range(shape[0] if shape else 1)
    if split in (Split.WHOLE, Split.EXPERT) or rank.tensor_ranks == 1:
        return Part(rows)
    dimension = 1 if split is Split.COLUMNS else 0
    if dimension >= len(shape):
        raise CannotSplit(f"its shape {list(shape)} has nothing to divide", field=name, fix="use one tensor rank")
    if split is Split.TABLE and unit[0] == 1:
        return Part(share(shape[0], rank.tensor_rank, rank.tensor_ranks))
    size, ranks = shape[dimension], rank.tensor_ranks
    if size % ranks or size // ranks % unit[dimension]:
        kind, step = ("rows", "columns")[dimension], unit[dimension]
        whole = f" in blocks of {step}" if step > 1 else ""
        fewer = [n for n in range(2, ranks) if ranks % n == 0 and size % n == 0 and size // n % step == 0]
        fix = f"use {fewer[-1]} tensor ranks" if fewer else "use one tensor rank, or a checkpoint with smaller blocks"
        raise CannotSplit(f"{size} {kind}{whole} do not divide among {ranks} tensor ranks", field=name, fix=fix)
    each = size // ranks
    mine = range(rank.tensor_rank * each, (rank.tensor_rank + 1) * each)
    return Part(mine) if dimension == 0 else Part(rows, mine)
