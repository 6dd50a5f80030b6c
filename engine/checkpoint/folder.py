"""A model folder: its config, and every tensor found through the shard index. Knows headers and bytes, no meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.header import Entry
from engine.checkpoint.shard import Bytes, Shard

INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Folder:
    """Tensors by the names they are stored under. Raises CheckpointError for a folder that is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json", "point model_dir at a folder with config.json")
        index = path / INDEX
        listed = _weight_map(index) if index.is_file() else None
        files = sorted(set(listed.values())) if listed else sorted(p.name for p in path.glob("*.safetensors"))
        if not files:
            raise _without_weights(path)
        self._shards = {name: self._open(name) for name in files}
        self._where = {tensor: name for name, shard in self._shards.items() for tensor in shard.entries}
        for tensor, name in (listed or {}).items():
            if tensor not in self._shards[name].entries:
                fix = "download the shard again, or rebuild the index"
                raise CheckpointError(f"{name} does not hold it", file=index, item=tensor, fix=fix)
            self._where[tensor] = name

    @property
    def names(self) -> list[str]:
        """Every stored tensor."""
        return list(self._where)

    def entry(self, name: str) -> Entry:
        """Type, shape and bytes of a tensor, as its shard's header has them."""
        return self._shard(name).entries[name]

    def file(self, name: str) -> Path:
        """The shard a tensor is in."""
        return self._shard(name).path

    def stored(self, name: str) -> str:
        """The tensor's stored type, as safetensors names it."""
        return self.entry(name).stored

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's stored shape; packed FP4 has half as many columns as values."""
        return self.entry(name).shape

    def num_bytes(self, name: str) -> int:
        """The tensor's stored size."""
        return self.entry(name).num_bytes

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes, a view of the mapped file."""
        return self._shard(name).raw(name)

    def forget(self, name: str) -> None:
        """Gives the mapped pages of a tensor's shard back to the system."""
        self._shard(name).forget()

    def _shard(self, name: str) -> Shard:
        return self._shards[self._where[name]]

    def _open(self, name: str) -> Shard:
        path = self.path / name
        if not path.is_file():
            raise CheckpointError("the index names this file, but it is missing", file=path, fix="download the shard")
        return Shard(path)


def holds_weights(path: Path) -> bool:
    """Whether a folder has weights in any form, also in one that `Folder` refuses."""
    return any(any(path.glob(pattern)) for pattern in ("*.safetensors", INDEX, *_PICKLED))


def read_json(path: Path, fix: str) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is missing or not one."""
    if not path.is_file():
        raise CheckpointError("the file is missing", file=path, fix=fix)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"not valid JSON: {error}", file=path, fix="restore the file") from error
    if not isinstance(content, dict):
        raise CheckpointError("not a JSON object", file=path, fix="restore the file")
    return content


def _without_weights(path: Path) -> CheckpointError:
    """Pickle runs whatever its author wrote, so that such a file is named and never opened."""
    for pattern in _PICKLED:
        if found := sorted(path.glob(pattern)):
            message = f"the weights are pickled ({found[0].name}), and pickle is never opened: it can run any code"
            return CheckpointError(message, file=path, fix="convert them to safetensors, or download that form")
    return CheckpointError("no .safetensors file", file=path, fix="add the weights, or point at another folder")


def _weight_map(index: Path) -> dict[str, str]:
    listed = read_json(index, "").get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError("no map from tensors to files", file=index, item="weight_map", fix="rebuild the index")
    for name in listed.values():
        if Path(name).name != name:
            raise CheckpointError(f"{name!r} leaves the folder", file=index, item="weight_map", fix="rebuild the index")
    return listed
