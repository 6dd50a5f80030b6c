"""What a folder's files hold, from their headers alone: types, bytes, what the config does not fit. Reads no weight."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.families.check import check
from engine.families.inventory import Model, Wanted
from engine.families.whole import misfits

_SHOWN = 3
_PACKED = ("I8", "U8")  # two FP4 values to a byte


@dataclass(frozen=True, slots=True)
class StoredType:
    """All tensors of one stored type, as safetensors names it."""

    type: str
    tensors: int
    bytes: int


class Contents:
    """The tensors of one folder under the names of one model."""

    def __init__(self, folder: Folder, model: Model) -> None:
        self._folder, self._model = folder, model
        self._stored = {model.upstream(name): name for name in folder.names}

    def types(self) -> tuple[StoredType, ...]:
        """By stored type, largest first."""
        tensors, size = defaultdict[str, int](int), defaultdict[str, int](int)
        for name in self._folder.names:
            kind = self._folder.stored(name)
            tensors[kind] += 1
            size[kind] += self._folder.num_bytes(name)
        found = [StoredType(kind, tensors[kind], size[kind]) for kind in tensors]
        return tuple(sorted(found, key=lambda stored: -stored.bytes))

    def bytes_of(self, wanted: Wanted) -> int:
        """Stored bytes of a tensor and its scale; 0 if it is missing."""
        names = (wanted.name, _scale(wanted.name))
        return sum(self._folder.num_bytes(self._stored[name]) for name in names if name in self._stored)

    def elsewhere_bytes(self) -> int:
        """Stored bytes of parts that the family's builder does not load."""
        prefixes = self._model.elsewhere
        names = (stored for name, stored in self._stored.items() if name.startswith(prefixes))
        return sum(map(self._folder.num_bytes, names))

    def problems(self) -> tuple[str, ...]:
        """What the loader would refuse: tensors that are missing, unknown, or of another shape."""
        wanted = {one.name: one for one in self._model.wanted}
        known = set(wanted) | {_scale(name) for name in wanted}
        unknown = [n for n in self._stored if n not in known and not n.startswith(self._model.elsewhere)]
        missing = [name for name in wanted if name not in self._stored]
        shapes = [problem for name in wanted.keys() & self._stored.keys() if (problem := self._shape(wanted[name]))]
        found = [_summary("missing", missing), _summary("unknown", unknown), *sorted(shapes)[:_SHOWN]]
        return tuple(problem for problem in found if problem) or self._misfit()

    def _misfit(self) -> tuple[str, ...]:
        """What only shows between files: scales and their weights, the tokenizer and the vocabulary."""
        try:
            check(self._folder)
        except CheckpointError as error:
            return (str(error),)
        return tuple(map(str, islice(misfits(self._folder, self._model, self._model.wanted), _SHOWN)))

    def _shape(self, wanted: Wanted) -> str:
        stored = self._stored[wanted.name]
        shape, expected = self._folder.shape(stored), wanted.shape
        if self._folder.stored(stored) in _PACKED and not wanted.integer:
            expected = (*expected[:-1], expected[-1] // 2)
        if shape == expected:
            return ""
        return f"{self._folder.file(stored)}: {stored}: shape {list(shape)}, the config asks for {list(expected)}"


def _scale(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _summary(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(sorted(names)[:_SHOWN])
    return f"{len(names)} {kind}: {shown}{' ...' if len(names) > _SHOWN else ''}"
