"""Every tensor that a family's loader asks for, by name and shape, without weights. Knows no formats and no bytes.

The family's own builder runs on shapes alone, so that what is counted here is what is loaded there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from engine.checkpoint.reader import Reader
from engine.checkpoint.table import RowTable
from engine.families import architecture
from engine.families.mla import build as mla_build
from engine.families.mla import config as mla_config
from engine.families.mla import layout as mla_layout
from engine.families.mla import names as mla_names
from engine.families.v4 import config as v4_config
from engine.families.v4 import layout as v4_layout
from engine.families.v4 import names as v4_names
from engine.families.v4 import weights as v4_weights
from engine.families.v41 import config as v41_config
from engine.families.v41 import layout as v41_layout
from engine.families.v41 import names as v41_names
from engine.families.v41 import options as v41_options
from engine.families.v41 import weights as v41_weights
from engine.layout import Layout
from kernels import Ops

_BLOCK_TOKENS = 128
_TYPE = torch.float32


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
    """A family's reading of one config.json. `layout` gives its cache groups for records of a type."""

    family: str
    config: Any  # the family's own
    wanted: tuple[Wanted, ...]
    layout: Callable[[str], Layout]
    upstream: Callable[[str], str]  # stored name -> the name in `wanted`
    elsewhere: tuple[str, ...]  # name prefixes of parts that the family's builder does not load


def read_model(config: dict[str, Any], stored: frozenset[str] | None = None) -> Model:
    """`stored`: names in the folder, or None for a config alone: then optional parts count as present.

    Raises CheckpointError naming the key of config.json that cannot be served.
    """
    return {"mla": _mla, "v4": _v4, "v41": _v41}[_package(architecture(config))](config, stored)


def _package(name: str) -> str:
    return {"DeepseekV4ForCausalLM": "v4", "DeepseekV41ForCausalLM": "v41"}.get(name, "mla")


def _mla(config: dict[str, Any], stored: frozenset[str] | None) -> Model:
    parsed, names = mla_config.parse(config), _Shapes(stored, mla_names.upstream)
    mla_build.build(cast(Reader, names), parsed, _NO_OPS, _TYPE, False)

    def layout(dtype: str) -> Layout:
        return mla_layout.mla_layout(parsed, dtype, _BLOCK_TOKENS)

    return Model(parsed.model_type, parsed, names.complete, layout, mla_names.upstream, ())


def _v4(config: dict[str, Any], stored: frozenset[str] | None) -> Model:
    parsed, names = v4_config.parse(config), _Shapes(stored, v4_names.upstream)
    v4_weights.build(cast(Reader, names), parsed, _NO_OPS, _TYPE)

    def layout(dtype: str) -> Layout:
        return v4_layout.v4_layout(parsed, dtype, _BLOCK_TOKENS)

    return Model("deepseek_v4", parsed, names.complete, layout, v4_names.upstream, ())


def _v41(config: dict[str, Any], stored: frozenset[str] | None) -> Model:
    parsed, names = v41_config.parse(config), _Shapes(stored, v41_names.upstream)
    v41_weights.build(cast(Reader, names), parsed, _NO_OPS, _TYPE)
    options = v41_options.parse_options(config)

    def layout(dtype: str) -> Layout:
        return v41_layout.v41_layout(parsed, options, dtype, _BLOCK_TOKENS)

    wanted, elsewhere = names.complete, names.elsewhere
    return Model("deepseek_v41", parsed, wanted, layout, v41_names.upstream, elsewhere)


class _Shapes:
    """Stands in for a Reader: answers with tensors that have a shape and no storage, and notes what was asked for."""

    def __init__(self, stored: frozenset[str] | None, upstream: Callable[[str], str]) -> None:
        self._stored = None if stored is None else {upstream(name) for name in stored}
        self.wanted: list[Wanted] = []
        self.elsewhere: tuple[str, ...] = ()
        self.complete: tuple[Wanted, ...] = ()

    def has(self, prefix: str) -> bool:
        return self._stored is None or any(name.startswith(prefix) for name in self._stored)

    def floats(self, name: str, *shape: int) -> torch.Tensor:
        self.wanted.append(Wanted(name, shape))
        return torch.empty(shape, device="meta")

    def stack(self, names: Sequence[str], *shape: int, then: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        self.wanted.extend(Wanted(name, shape) for name in names)
        return torch.empty(len(names) + len(then), *shape, device="meta")

    def integers(self, name: str, *shape: int, below: int) -> torch.Tensor:
        self.wanted.append(Wanted(name, shape, integer=True))
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def table(self, name: str, rows: int, width: int) -> RowTable:
        return RowTable(self.floats(name, rows, width), None)

    def leave(self, *prefixes: str) -> None:
        """Notes the prefixes that belong to a part which is not loaded here."""
        self.elsewhere += prefixes

    def finish(self) -> None:
        """The builder has asked for everything: only now is the list complete."""
        self.complete = tuple(self.wanted)


_NO_OPS = cast(Ops, SimpleNamespace(pack=lambda weights, rounds: weights))
