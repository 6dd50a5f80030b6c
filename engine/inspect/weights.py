"""A model's weights by part: parameters, how many one token uses, bytes, and what a rank holds. Arithmetic only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.rank import CannotSplit, Rank, Split, part_of, share, split_of
from engine.errors import InvalidParameter
from engine.families.inventory import Model, Wanted
from engine.inspect.formats import Format, Publication, stored, unit
from engine.inspect.parts import Part, part_of_model


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor with its part and its bytes, scales included."""

    wanted: Wanted
    part: Part
    format: Format  # as published, whatever a folder stores
    bytes: int
    unit: tuple[int, int]  # rows and columns that share a scale


@dataclass(frozen=True, slots=True)
class PartCost:
    """One part of the model. `active`: parameters that one decoded token multiplies with or looks up."""

    part: str
    parameters: int
    active: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RankCost:
    """Weights that one rank holds of a model spread over `tensor` x `expert` ways."""

    tensor: int
    expert: int
    bytes: int
    expert_bytes: int  # of them, routed experts
    table_bytes: int  # of them, rows that are looked up one by one; the engine leaves these on disk
    replicated_bytes: int  # of them, held by every rank


def published_weights(model: Model, published: Publication) -> tuple[Weight, ...]:
    """Every tensor of the model with the bytes of its published format."""
    layers, weights = model.facts.layers, []
    for wanted in model.wanted:
        part = part_of_model(wanted.name, layers)
        kind, size = stored(wanted, part, published)
        weights.append(Weight(wanted, part, kind, size, unit(kind, published)))
    return tuple(weights)


def by_part(model: Model, weights: Iterable[Weight]) -> tuple[PartCost, ...]:
    """Costs by part, in the order in which parts first appear."""
    parameters, active, size = defaultdict[Part, int](int), defaultdict[Part, float](float), defaultdict[Part, int](int)
    for weight in weights:
        part = weight.part
        parameters[part] += weight.wanted.numbers
        active[part] += weight.wanted.numbers * _used(model.facts.config, weight)
        size[part] += weight.bytes
    return tuple(PartCost(part.value, parameters[part], round(active[part]), size[part]) for part in parameters)


def _used(config: Any, weight: Weight) -> float:
    """The share of a tensor that one token uses."""
    part, rows = weight.part, weight.wanted.shape[0]
    if part is Part.EXPERTS:
        return float(config.experts_per_token / config.experts)
    if part is Part.ENGRAM_TABLE:
        return float(config.engram.columns / rows)
    if part is Part.EMBEDDING or weight.wanted.integer:
        return 1 / rows
    return 0.0 if part in (Part.DRAFT, Part.VISION) else 1.0


def per_rank(model: Model, weights: Iterable[Weight], tensor: int, expert: int) -> RankCost:
    """The largest rank, divided by the rules that loading by rank has.

    Raises InvalidParameter, naming `tp` or `ep` and the tensor, for a model that cannot be divided so.
    """
    config = model.facts.config
    if not 1 <= expert <= config.experts:
        raise InvalidParameter("ep", f"{expert} ranks for {config.experts} experts", "use at most one rank per expert")
    if tensor < 1 or config.heads % tensor:
        raise InvalidParameter("tp", f"{tensor} does not divide {config.heads} heads", "use a divisor of the heads")
    largest = max(len(share(config.experts, rank, expert)) for rank in range(expert))
    size = defaultdict[Split, int](int)
    for weight in weights:
        name = weight.wanted.name
        split = split_of(name, model.rules) or Split.WHOLE
        if split is Split.EXPERT:
            size[split] += weight.bytes * largest // config.experts
            continue
        try:
            part_of(name, split, weight.wanted.shape, weight.unit, Rank(tensor_ranks=tensor))
        except CannotSplit as error:
            raise InvalidParameter("tp", f"{name}: {error.message}", error.fix) from error
        size[split] += weight.bytes if split is Split.WHOLE else -(-weight.bytes // tensor)
    return RankCost(tensor, expert, sum(size.values()), size[Split.EXPERT], size[Split.TABLE], size[Split.WHOLE])
