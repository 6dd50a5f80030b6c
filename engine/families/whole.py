"""Whether a folder's tensors are those that a family will ask for, from headers alone. Reads no weight."""

from __future__ import annotations

from collections.abc import Iterable

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.scales import FLOATS, INTEGERS, PACKED, scale_name
from engine.families.inventory import Model, Wanted, read_model

_ANOTHER = "use the config.json that belongs to these weights"
_DOWNLOAD = "download the missing shard, or " + _ANOTHER
_AGAIN = "convert the checkpoint again"


def check_whole(folder: Folder) -> None:
    """Raises CheckpointError for the first tensor that the load would stumble over: minutes later, and half loaded.

    Only what the text engine loads is judged: a folder may hold other parts, such as an image encoder.
    """
    model = read_model(folder.config, frozenset(folder.names))
    for misfit in misfits(folder, model, model.loaded):
        raise misfit


def misfits(folder: Folder, model: Model, wanted: Iterable[Wanted]) -> Iterable[CheckpointError]:
    """Each of the wanted tensors that is missing, of another shape or of another type than can be read as it."""
    stored = {model.upstream(name): name for name in folder.names}
    for one in wanted:
        if one.name not in stored:
            yield CheckpointError("the tensor is missing", file=folder.path, item=one.name, fix=_DOWNLOAD)
        elif found := _misfit(folder, stored, one):
            at = stored[one.name]
            yield CheckpointError(found[0], file=folder.file(at), item=at, fix=found[1])


def _misfit(folder: Folder, stored: dict[str, str], wanted: Wanted) -> tuple[str, str] | None:
    """What is wrong with a tensor that is there, and what to do."""
    at, scale = stored[wanted.name], scale_name(wanted.name)
    kind, shape = folder.stored(at), folder.shape(at)
    if wanted.integer:
        fits = kind in INTEGERS and shape == wanted.shape
        return None if fits else (f"{kind} {list(shape)}, expected integers {list(wanted.shape)}", _ANOTHER)
    if kind in INTEGERS:
        return f"stored as {kind}, numbers are expected", _AGAIN
    if len(shape) == len(wanted.shape) == 2 and kind in PACKED:
        shape = (shape[0], shape[1] * 2)
    if shape != wanted.shape:
        return f"shape {list(shape)}, but the config asks for {list(wanted.shape)}", _ANOTHER
    if kind not in FLOATS and (scale not in stored or len(shape) != 2):
        return f"stored as {kind}, which needs a matrix and its scale {scale}", _AGAIN
    if kind in FLOATS and wanted.name.endswith(".weight") and scale in stored:
        return f"stored as {kind}, which has no scale, but {stored[scale]} is there", _AGAIN
    return None
