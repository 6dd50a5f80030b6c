"""Weights kept as they are published, where the operators keep any and the checkpoint has them so. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.checkpoint.reader import Reader
from kernels import Ops
from kernels.operands import ExpertBank, Weights
from kernels.reference.gemm import Fp4Weights, Fp8Weights
from kernels.reference.scaled import Scaled, ScaledExperts

_SQUARE = 128  # rows that may share a scale: a matrix below another begins at a multiple


def matrices(
    reader: Reader, ops: Ops, parts: Sequence[tuple[str, int]], columns: int, order: list[int] | None = None,
    groups: int = 1,
) -> Weights | None:  # fmt: skip
    """Stored matrices (name, rows) of one input, one below the other, as one product of outputs in `order`; or `groups`
    equal parts of one, each a product of its own input. None, and nothing is taken, where they cannot be kept."""
    cuts = [rows for _, rows in parts[:-1]] + [parts[-1][1] // groups] * (groups > 1)
    if ops.keep is None or any(rows % _SQUARE for rows in cuts):
        return None
    kinds = {reader.block_kind([name], rows, columns) for name, rows in parts}
    if len(kinds) > 1 or None in kinds:
        return None
    whole = _below([reader.blocks([name], rows, columns) for name, rows in parts])
    split = type(whole)(*(part.view(groups, -1, part.shape[2]) for part in (whole.codes, whole.scales)))
    return ops.keep(split, None if order is None else torch.tensor(order, device=ops.device))


def bank(
    reader: Reader, ops: Ops, routed: Sequence[str], shared: str, names: Sequence[str], inner: int, hidden: int,
    limit: float,
) -> ExpertBank | None:  # fmt: skip
    """Experts under the prefixes `routed` and `shared`, whose matrices are called `names` (gate, up, down); None, and
    nothing is taken, where they cannot be kept."""
    if ops.keep is None or inner % _SQUARE:
        return None
    shapes = dict(zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True))
    sets = [some for some in (list(routed), [shared]) if some]
    kinds = [{reader.block_kind(_named(some, name), *shape) for name, shape in shapes.items()} for some in sets]
    if any(len(one) > 1 or None in one for one in kinds):
        return None
    pairs = [_pair(reader, ops, some, shapes) for some in sets]
    return ExpertBank(ScaledExperts(pairs[0] if routed else None, pairs[-1]), None, None, len(routed), inner, limit)


def _pair(
    reader: Reader, ops: Ops, prefixes: Sequence[str], shapes: dict[str, tuple[int, int]]
) -> tuple[Scaled, Scaled]:
    gate, up, down = (reader.blocks(_named(prefixes, name), *shape) for name, shape in shapes.items())
    assert ops.keep is not None  # noqa: S101  narrows the type
    return ops.keep(_below([gate, up]), None), ops.keep(down, None)


def _named(prefixes: Sequence[str], name: str) -> list[str]:
    return [f"{prefix}.{name}.weight" for prefix in prefixes]


def _below(parts: Sequence[Fp8Weights | Fp4Weights]) -> Fp8Weights | Fp4Weights:
    """One below the other."""
    return type(parts[0])(torch.cat([one.codes for one in parts], 1), torch.cat([one.scales for one in parts], 1))
