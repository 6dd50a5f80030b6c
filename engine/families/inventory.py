"""Every tensor that a family's loader asks for, by name and shape, without weights. Knows no formats and no bytes.

The family's own builder runs on shapes alone, so that what is counted here is what is loaded there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.rank import Rule
from engine.checkpoint.reader import Reader
from engine.checkpoint.sharding import Naming
from engine.checkpoint.table import RowTable
from engine.families.facts import Facts
from engine.families.registry import package_of
from kernels import Ops

_MOST_NUMBERS = 1 << 48  # of one operand: 256 times the largest published table


@dataclass(frozen=True, slots=True)
class Wanted:
    """One tensor: its upstream name and its shape before any packing."""

    name: str
    shape: tuple[int, ...]
    integer: bool = False

    @property
    def numbers(self) -> int:
        """Parameters it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Model:
    """A family's reading of one config.json, with the tensors that it asked for."""

    facts: Facts
    wanted: tuple[Wanted, ...]
    loaded: tuple[Wanted, ...]  # of them, what the text engine loads
    upstream: Callable[[str], str]  # stored name -> the name in `wanted`
    rules: tuple[Rule, ...]  # how ranks divide what has such a name
    elsewhere: tuple[str, ...]  # name prefixes of parts that the family does not load


def read_model(config: dict[str, Any], stored: frozenset[str] | None = None) -> Model:
    """`stored`: names in the folder, or None for a config alone: then optional parts count as present.

    Raises CheckpointError naming the key of config.json that cannot be served.
    """
    package = package_of(config)
    naming: Naming = import_module(f"{package}.names").NAMING
    shapes = _Shapes(stored, naming.upstream)
    with _ByShape():
        facts: Facts = import_module(f"{package}.facts").read(config, cast(Reader, shapes), _NO_OPS)
    return Model(facts, shapes.complete, shapes.loaded, naming.upstream, naming.rules, shapes.elsewhere)


class _Shapes:
    """Stands in for a Reader: answers with tensors that have a shape and no storage, and notes what was asked for."""

    def __init__(self, stored: frozenset[str] | None, upstream: Callable[[str], str]) -> None:
        self._stored = None if stored is None else {upstream(name) for name in stored}
        self.wanted: list[Wanted] = []
        self._left: tuple[str, ...] = ()
        self.complete: tuple[Wanted, ...] = ()
        self.loaded: tuple[Wanted, ...] = ()

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Prefixes that one part left to another, under which no part asked for anything."""
        names = [one.name for one in self.complete]
        return tuple(prefix for prefix in self._left if not any(name.startswith(prefix) for name in names))

    def has(self, prefix: str) -> bool:
        return self._stored is None or any(name.startswith(prefix) for name in self._stored)

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        return self._note([name], shape, False, shape)

    def stack(self, names: Sequence[str], *shape: int, then: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        return self._note(names, shape, False, (len(names) + len(then), *shape))

    def integers(self, name: str, *shape: int, below: int) -> torch.Tensor:
        return self._note([name], shape, True, shape)

    def table(self, name: str, rows: int, width: int) -> RowTable:
        return RowTable(self.floats(name, rows, width), None)

    def leave(self, *prefixes: str) -> None:
        """Notes the prefixes that belong to a part which is not loaded here."""
        self._left += prefixes

    def finish(self) -> None:
        """The builder has asked for everything: only now is the list complete."""
        self.complete = tuple(self.wanted)
        self.loaded = self.loaded or self.complete  # the text engine's part is built first

    def _note(
        self, names: Sequence[str], shape: tuple[int, ...], integer: bool, answer: tuple[int, ...]
    ) -> torch.Tensor:
        if (size := math.prod(answer)) > _MOST_NUMBERS:
            message, fix = f"{list(shape)}, as the config asks for, is too large", "restore the published config.json"
            raise CheckpointError(f"{message}: {size:,} numbers", file="config.json", item=names[0], fix=fix)
        self.wanted.extend(Wanted(name, shape, integer) for name in names)
        return torch.empty(answer, dtype=torch.int64 if integer else torch.float32, device="meta")


class _ByShape(TorchFunctionMode):
    """What builders do with weights, by shape alone: without storage, torch would load its compiler for it (2 s)."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.cat and len(args) == 1:
            (parts,) = args
            return torch.empty(sum(map(len, parts)), *parts[0].shape[1:], device="meta")
        if func in (torch.Tensor.div, torch.Tensor.__truediv__) and isinstance(args[1], float):
            return args[0]
        if func is torch.Tensor.__getitem__:
            picked = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = args[0], tuple(slice(len(one)) if isinstance(one, list) else one for one in picked)
        return func(*args, **(kwargs or {}))


_NO_OPS = cast(Ops, SimpleNamespace(keep=None, pack=lambda weights, rounds: weights))
