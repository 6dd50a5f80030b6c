"""A process that writes records into a directory of segments until it is killed. Says where it is on its output.

Records are numbered; the bytes of each follow from its number, so that a reader can tell whether they are whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fabric.kvlink.verify import digest
from fabric.records import Extent
from services.kvstore.nvme.files import SegmentFiles
from services.kvstore.nvme.format import PAGE, Stored
from services.kvstore.records import ROOT, Identity, RecordId, RecordKind

SEGMENT_BYTES = 64 * PAGE


def payload(number: int) -> np.ndarray:
    """3,000 to 60,000 bytes."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, int(rng.integers(3_000, 60_000)), dtype=np.uint8)


def record(number: int) -> tuple[Stored, np.ndarray]:
    data = payload(number)
    extent = Extent("latent", 0, 1, 0, len(data), digest(data))
    name = RecordId(RecordKind.BLOCK, number.to_bytes(32))
    return Stored(name, Identity("rev", "layout"), b"", ROOT, len(data), (extent,), 0.0), data


def main(folder: Path, first: int) -> None:
    files = SegmentFiles(folder, SEGMENT_BYTES, direct=False)
    number = first
    while True:
        files.append(*record(number))
        print(number, flush=True)
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
