"""The report on one checkpoint: put together from its config and, where there are weights, their headers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.document import read_json
from engine.checkpoint.folder import Folder, holds_weights
from engine.errors import InvalidParameter
from engine.families.inventory import Model, read_model
from engine.inspect.caches import CacheCost, cache_costs
from engine.inspect.contents import Contents, StoredType
from engine.inspect.formats import publication
from engine.inspect.parts import Part
from engine.inspect.weights import PartCost, RankCost, Weight, by_part, per_rank, published_weights
from engine.inspect.windows import WindowChoice, window_choices

_USUAL_RANKS = ((1, 1), (8, 8), (8, 64))
_USUAL_MEMORIES = (24 * 10**9, 80 * 10**9, 141 * 10**9)
_POINT = "name a checkpoint's folder, or a config.json"


@dataclass(frozen=True, slots=True)
class Question:
    """What to look at. `memories` are bytes of one rank; a rank holds the caches of `sequences` sequences.

    Without `tensor` and `expert` the usual ranks are looked at, as far as the model divides among them, and without
    `memories` the usual ones.
    """

    path: Path
    tensor: tuple[int, ...] = (1,)
    expert: tuple[int, ...] = (1,)
    memories: tuple[int, ...] = ()
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """Context tokens, over all sequences, that a rank holds beside its weights; 0 if it cannot even hold those."""

    tensor: int
    expert: int
    memory_bytes: int
    format: str
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `deepinfer inspect` prints. `stored` is empty for a config alone: its bytes are predicted."""

    path: str
    family: str
    layers: int
    max_context_tokens: int
    parameters: int  # of the text model; drafts not counted
    draft_parameters: int
    vision_parameters: int
    active_parameters: int
    parts: tuple[PartCost, ...]
    weight_bytes: int
    elsewhere_bytes: int  # stored parts that the text engine does not load, such as drafts
    formats: dict[str, int]  # published storage: format -> bytes
    stored: tuple[StoredType, ...]
    problems: tuple[str, ...]
    caches: tuple[CacheCost, ...]
    other_caches: dict[str, str]  # formats that do not fit this model, and why
    window_states: tuple[WindowChoice, ...]  # with bf16 records; empty for a model that caches no windows
    ranks: tuple[RankCost, ...]
    fits: tuple[Fit, ...]


def inspect(question: Question) -> Report:
    """Raises CheckpointError naming file and key or tensor, and InvalidParameter naming the option."""
    config, folder = _open(question.path)
    model = read_model(config, None if folder is None else frozenset(folder.names))
    weights = predicted = published_weights(model, publication(config, model.facts))
    if contents := Contents(folder, model) if folder else None:
        weights = tuple(replace(weight, bytes=contents.bytes_of(weight.wanted)) for weight in predicted)
    parts, elsewhere = by_part(model, weights), contents.elsewhere_bytes() if contents else 0
    counted = [part for part in parts if part.part not in (Part.DRAFT, Part.VISION)]
    text = [weight for weight in weights if weight.part is not Part.VISION]  # what an engine loads
    caches, others = cache_costs(model)
    ranks = tuple(_ranks(question, model, text))
    return Report(
        path=str(question.path),
        family=model.facts.family,
        layers=model.facts.layers,
        max_context_tokens=model.facts.config.max_context_tokens,
        parameters=sum(part.parameters for part in counted),
        draft_parameters=sum(part.parameters for part in parts if part.part == Part.DRAFT),
        vision_parameters=sum(part.parameters for part in parts if part.part == Part.VISION),
        active_parameters=sum(part.active for part in counted),
        parts=parts,
        weight_bytes=sum(part.bytes for part in parts) + elsewhere,
        elsewhere_bytes=elsewhere,
        formats=_formats(predicted),
        stored=contents.types() if contents else (),
        problems=contents.problems() if contents else (),
        caches=caches,
        other_caches=others,
        window_states=window_choices(model.facts.layout("bfloat16"), model.facts.config.max_context_tokens),
        ranks=ranks,
        fits=tuple(_fits(question, ranks, caches)),
    )


def _open(path: Path) -> tuple[dict[str, Any], Folder | None]:
    """A folder with weights, a folder with a config alone, or a config."""
    if not path.exists():
        raise InvalidParameter("checkpoint", f"{path} does not exist", _POINT)
    if path.is_file():
        return read_json(path, _POINT), None
    if holds_weights(path):
        folder = Folder(path)
        return folder.config, folder
    return read_json(path / "config.json", _POINT), None


def _formats(weights: Iterable[Weight]) -> dict[str, int]:
    size = defaultdict[str, int](int)
    for weight in weights:
        size[weight.format.value] += weight.bytes
    return dict(sorted(size.items(), key=lambda item: -item[1]))


def _ranks(question: Question, model: Model, weights: list[Weight]) -> Iterable[RankCost]:
    if question.tensor or question.expert:
        for tensor in question.tensor or (1,):
            for expert in question.expert or (1,):
                yield per_rank(model, weights, tensor, expert)
        return
    for tensor, expert in _USUAL_RANKS:
        with suppress(InvalidParameter):  # nobody asked for these: a model that does not divide so has fewer rows
            yield per_rank(model, weights, tensor, expert)


def _fits(question: Question, ranks: Iterable[RankCost], caches: Iterable[CacheCost]) -> Iterable[Fit]:
    for rank in ranks:
        for memory in question.memories or _USUAL_MEMORIES:
            for cache in caches:
                fixed = question.sequences * (cache.bytes_per_sequence + cache.rollback_bytes)
                left = max(0, memory - rank.bytes - fixed)
                yield Fit(rank.tensor, rank.expert, memory, cache.format, int(left / cache.bytes_per_token))
