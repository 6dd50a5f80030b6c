"""Whether a folder can be served, from its config, index, headers and tokenizer alone: seconds before any weight.

Values are judged where they are read: NaN in a weight or a scale is found by the load itself.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.checkpoint.document import read_json
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.rank import Rank, expert_of
from engine.checkpoint.scales import is_quantized, scale_name
from engine.checkpoint.sharding import Naming, experts_of, parts
from engine.families import serving
from engine.families.fields import is_integer
from engine.families.registry import package_of

TOKENIZER = "tokenizer.json"
_DOWNLOAD = "download the missing shard, or use the config.json that belongs to these weights"
_ANOTHER = "use the config.json that belongs to these weights"
_LAYER, _DRAFT = re.compile(r"^layers\.(\d+)\."), re.compile(r"^mtp\.(\d+)\.")
_DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")  # two spellings
_LEAST_USED = 0.95  # of a vocabulary: V2 pads its by 2.3 %, V3 by 0.4 %


def check_folder(path: Path) -> None:
    """Raises CheckpointError, naming file and tensor or key, for a folder that `open_family` would refuse."""
    check(Folder(path))


def check(folder: Folder) -> None:
    """As `check_folder`, for a folder whose index and headers have been read."""
    package = package_of(folder.config)
    config = import_module(f"{package}.config")
    config.parse(folder.config)
    serving.flags(folder.config, config.SWITCHES)
    naming: Naming = import_module(f"{package}.names").NAMING
    parts(folder, naming, Rank())
    stored = naming.stored(folder)
    _check_scales(folder, stored)
    _check_layers(folder, stored)
    _check_experts(folder, stored)
    check_tokenizer(folder)


def _check_scales(folder: Folder, stored: dict[str, str]) -> None:
    for name, at in stored.items():
        is_weight = name.endswith(".weight") and is_quantized(folder.entry(at))
        if is_weight and scale_name(name) not in stored:
            raise CheckpointError("the tensor is missing", file=folder.path, item=scale_name(name), fix=_DOWNLOAD)


def _check_layers(folder: Folder, stored: dict[str, str]) -> None:
    """Every layer of the config has tensors, and there are no more layers than the config has, drafts included."""
    text = folder.config.get("text_config", folder.config)
    layers = int(text["num_hidden_layers"])
    drafts = max(text[key] for key in _DRAFTS if is_integer(text.get(key))) if any(map(text.get, _DRAFTS)) else 0
    found = {int(match[1]): at for name, at in stored.items() if (match := _LAYER.match(name))}
    if missing := sorted(set(range(layers)) - set(found)):
        raise CheckpointError("the layer has no tensors", file=folder.path, item=f"layers.{missing[0]}", fix=_DOWNLOAD)
    if found and (last := max(found)) >= layers + drafts:
        message = f"unknown tensor: num_hidden_layers is {layers}"
        raise CheckpointError(message, file=folder.file(found[last]), item=found[last], fix=_ANOTHER)
    for name, at in stored.items():
        if (match := _DRAFT.match(name)) and int(match[1]) >= drafts:
            message = f"unknown tensor: num_nextn_predict_layers is {drafts}"
            raise CheckpointError(message, file=folder.file(at), item=at, fix=_ANOTHER)


def _check_experts(folder: Folder, stored: dict[str, str]) -> None:
    """Whatever one expert of a layer has, all of them have."""
    every = set(range(experts_of(folder.config)))
    having: dict[tuple[str, str], set[int]] = {}
    for name in stored:
        if (expert := expert_of(name)) is not None:
            before, after = name.split(f".experts.{expert}.", 1)
            having.setdefault((before, after), set()).add(expert)
    for (before, after), experts in having.items():
        if missing := every - experts:
            item = f"{before}.experts.{min(missing)}.{after}"
            raise CheckpointError("the tensor is missing", file=folder.path, item=item, fix=_DOWNLOAD)


def check_tokenizer(folder: Folder) -> None:
    """Raises CheckpointError for a tokenizer that gives ids beyond the vocabulary, or uses too few of it to be its own.

    A published vocabulary is padded, so that a few ids may be unused. A folder without tokenizer passes.
    """
    path, key = folder.path / TOKENIZER, "vocab_size"
    if not path.is_file():
        return
    vocabulary = int(folder.config.get("text_config", folder.config)[key])
    used = 1 + max(_ids(read_json(path, "restore the file"), path))
    if used > vocabulary or used < _LEAST_USED * vocabulary:
        message = f"{used} token ids, but {key} of config.json is {vocabulary}"
        raise CheckpointError(message, file=path, item=key, fix="use the tokenizer that belongs to these weights")


def _ids(tokenizer: dict[str, Any], path: Path) -> list[int]:
    """Ids of the vocabulary and of added tokens."""
    try:
        model, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens") or []
        ids = list(model.values()) if isinstance(model, dict) else list(range(len(model)))
        ids += [token["id"] for token in added]
        if not ids or not all(isinstance(token, int) for token in ids):
            raise ValueError(json.dumps(ids[:1]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError("no vocabulary in it", file=path, item="model.vocab", fix="restore the file") from error
    return ids
