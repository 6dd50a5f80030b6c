"""Loads what one rank holds, in the form it is stored in. Knows parts and bytes; dequantizes and computes nothing."""

from __future__ import annotations

import torch

from engine.checkpoint.folder import Folder
from engine.checkpoint.progress import Meter, Progress
from engine.checkpoint.rank import Rank
from engine.checkpoint.sharding import Naming, part_bytes, parts
from engine.checkpoint.tensors import read


def load_rank(folder: Folder, naming: Naming, rank: Rank, progress: Progress | None = None) -> dict[str, torch.Tensor]:
    """Stored name -> the rank's part as stored: float8 and packed FP4 bytes, their scales, floats, integers.

    Only pages that hold the rank's bytes are read, and beside the tensors this process never holds more than 4 MiB of
    the files. Raises CheckpointError, before anything is read, as `sharding.parts` does.
    """
    mine = parts(folder, naming, rank)
    sizes = {name: part_bytes(folder, name, part) for name, part in mine.items()}
    meter, tensors = Meter(len(sizes), sum(sizes.values()), progress), {}
    for name, part in mine.items():
        tensors[name] = read(folder, name, part)
        meter.add(sizes[name])
    return tensors
