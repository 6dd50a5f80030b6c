"""A model folder: its config, and every tensor found through the shard index. Knows headers and bytes, no meaning."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.document import read_json
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.header import Entry
from engine.checkpoint.shard import Bytes, Shard

INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Folder:
    """Tensors by the names they are stored under. Raises CheckpointError for a folder that is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json", "name a model's folder, with its config.json")
        index = path / INDEX
        listed = _weight_map(index) if index.is_file() else None
        files = sorted(set(listed.values())) if listed else sorted(p.name for p in path.glob("*.safetensors"))
        if not files:
            raise _without_weights(path)
        self._shards = {name: self._open(name) for name in files}
        self._where = self._places()
        for tensor, name in (listed or {}).items():
            if tensor not in self._shards[name].entries:
                fix = "download the shard again, or rebuild the index"
                raise CheckpointError(f"{name} does not hold it", file=index, item=tensor, fix=fix)

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
            raise CheckpointError("this shard is missing, or is no file", file=path, fix="download the shard")
        return Shard(path)

    def _places(self) -> dict[str, str]:
        """Tensor -> shard. Two of one name may differ, and which of them is served must not hang on an order."""
        where: dict[str, str] = {}
        for name, shard in self._shards.items():
            for tensor in shard.entries:
                if (first := where.setdefault(tensor, name)) != name:
                    fix = "remove the file that does not belong here, or download both again"
                    raise CheckpointError(f"{first} holds it too", file=shard.path, item=tensor, fix=fix)
        return where


def holds_weights(path: Path) -> bool:
    """Whether a folder has weights in any form, also in one that `Folder` refuses."""
    return any(any(path.glob(pattern)) for pattern in ("*.safetensors", INDEX, *_PICKLED))


def _without_weights(path: Path) -> CheckpointError:
    """Pickle runs whatever its author wrote, so that such a file is named and never opened."""
    for pattern in _PICKLED:
        if found := sorted(path.glob(pattern)):
            message = f"the weights are pickled ({found[0].name}), and pickle is never opened: it can run any code"
            return CheckpointError(message, file=path, fix="convert them to safetensors, or download that form")
    return CheckpointError("no .safetensors file", file=path, fix="add the weights, or point at another folder")


def _weight_map(index: Path) -> dict[str, str]:
    """Names must be those of files beside the index: no path, and nothing that is not safetensors."""
    listed, fix = read_json(index, "").get("weight_map"), "rebuild the index"
    if not listed or not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError("no map from tensors to files", file=index, item="weight_map", fix=fix)
    for tensor, name in listed.items():
        if Path(name).name != name or "\0" in name or len(name.encode("utf-8", "replace")) > _LONGEST_NAME:
            raise CheckpointError(f"{name[:99]!r} leaves the folder", file=index, item=f"weight_map.{tensor}", fix=fix)
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{name!r} is no safetensors file", file=index, item=f"weight_map.{tensor}", fix=fix)
    return listed
