"""Exported prefixes: one file that says what it holds and can be checked anywhere. Knows bytes and digests, no store.

prelude: magic, bytes of the header, digest of the header
header:  JSON: identity, then for each record its kind, key, parent, extents with their digests, tokens if wanted
zeros up to a page
payload: the records one after the other, as they lie in a store
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fabric.errors import DataLoss, InvalidArgument
from fabric.kvlink.link import Bytes
from fabric.kvlink.verify import DIGEST_KIND, digest

FORMAT = "deepinfer-kv-prefix-1"
_MAGIC = b"DIKVFILE"
_PRELUDE = struct.Struct("<8sQQ")
_PAGE = 4096
_MOST_HEADER = 1 << 30


@dataclass(frozen=True, slots=True)
class FileExtent:
    """`offset` counts from the start of its record; `digest` in hexadecimal digits."""

    group: str
    valid_entries: int
    offset: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileRecord:
    """`offset` counts from the start of the payload; `token_ids` are there only where they were asked for."""

    kind: str
    key: str
    parent: str
    offset: int
    size: int
    extents: tuple[FileExtent, ...]
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file says of itself: blocks from the start of a prefix, then perhaps the anchor of the last one."""

    model_revision: str
    layout_fingerprint: str
    records: tuple[FileRecord, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(record.size for record in self.records)

    @property
    def blocks(self) -> int:
        return sum(record.kind == "block" for record in self.records)


def create(path: Path, contents: Contents) -> Bytes:
    """Writes everything but the payload, which is returned to be filled: uint8 [payload_bytes], mapped. For the owner
    of the file alone: KV tells its prompt.

    Raises:
        InvalidArgument: the file cannot be made there.
    """
    header = json.dumps({"format": FORMAT, "digest_kind": DIGEST_KIND, **asdict(contents)}).encode()
    start = _payload_at(len(header))
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_PRELUDE.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header)) + header)
            os.posix_fallocate(file.fileno(), 0, start + contents.payload_bytes)
    except OSError as error:
        raise InvalidArgument(
            f"{path}: {error.strerror}", field="--to", fix="name a file that can be written"
        ) from error
    return np.memmap(path, np.uint8, mode="r+", offset=start, shape=(contents.payload_bytes,))


def read(path: Path) -> tuple[Contents, Bytes]:
    """What the file says, and its payload, mapped and unchecked.

    Raises:
        InvalidArgument: it is no such file. DataLoss: it is one, and it is cut short or its header is damaged.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prelude = file.read(_PRELUDE.size)
            if not prelude.startswith(_MAGIC) or len(prelude) < _PRELUDE.size:
                raise InvalidArgument(f"{path} is no exported prefix", field="FILE", fix="name one of `kv export`")
            _, length, seal = _PRELUDE.unpack(prelude)
            header = file.read(min(length, _MOST_HEADER))
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}", field="FILE", fix="name a file that can be read") from error
    if len(header) != length or xxhash.xxh3_64_intdigest(header) != seal:
        raise DataLoss(f"the header of {path} is damaged", field="FILE", fix="export it again")
    contents, start = _contents(json.loads(header)), _payload_at(length)
    if size != start + contents.payload_bytes:
        raise DataLoss(
            f"{path} has {size} bytes, not {start + contents.payload_bytes}", field="FILE", fix="export again"
        )
    return contents, np.memmap(path, np.uint8, mode="r", offset=start, shape=(contents.payload_bytes,))


def damaged(contents: Contents, payload: Bytes) -> Iterator[FileRecord | None]:
    """For each record in order: the record where a byte of it is not as it was sealed, None where all are."""
    for record in contents.records:
        yield None if _is_sound(record, payload) else record


def _is_sound(record: FileRecord, payload: Bytes) -> bool:
    """Every byte belongs to one extent, and every extent has its digest."""
    end = 0
    for extent in record.extents:
        start = record.offset + extent.offset
        if extent.offset != end or digest(payload[start : start + extent.size]) != int(extent.digest, 16):
            return False
        end += extent.size
    return end == record.size


def _contents(header: dict[str, Any]) -> Contents:
    """Raises InvalidArgument for a header of another version, or whose records do not follow each other."""
    try:
        if header["format"] != FORMAT or header["digest_kind"] != DIGEST_KIND:
            raise KeyError(header["format"])
        records = tuple(_record(record) for record in header["records"])
        contents = Contents(header["model_revision"], header["layout_fingerprint"], records)
    except (KeyError, TypeError) as error:
        raise InvalidArgument(f"a header of another version: {error}", field="FILE", fix="use its deepinfer") from error
    _require_chain(records)
    return contents


def _record(header: dict[str, Any]) -> FileRecord:
    extents = tuple(FileExtent(**extent) for extent in header.pop("extents"))
    tokens = header.pop("token_ids")
    return FileRecord(**header, extents=extents, token_ids=None if tokens is None else tuple(tokens))


def _require_chain(records: Sequence[FileRecord]) -> None:
    """Raises DataLoss unless blocks continue each other from a prefix's start, and an anchor is the last one's."""
    offset, parent = 0, "0" * 64
    for number, record in enumerate(records):
        last = number == len(records) - 1
        continues = record.parent == parent if record.kind == "block" else last and record.key == parent
        if record.offset != offset or not continues:
            raise DataLoss(f"record {number} does not continue the one before", field="FILE", fix="export it again")
        offset, parent = offset + record.size, record.key


def _payload_at(header_bytes: int) -> int:
    return -(-(_PRELUDE.size + header_bytes) // _PAGE) * _PAGE
