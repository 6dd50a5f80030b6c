"""Items: the records of one offer, where they lie in the engine's pool, and how they are sealed. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.layout import Layout
from engine.offers import Offer
from fabric.kvlink import Write, plan
from fabric.kvlink.verify import digest
from fabric.records import Extent, Landing
from protos.deepinfer.v1 import kvstore_pb2 as pb
from services.worker.geometry import record_places
from services.worker.regions import PoolRegions


@dataclass(frozen=True, slots=True)
class Item:
    """One record to offer: row `row` of the block pool, or of the slot pool where `anchor`."""

    offer: pb.RecordOffer
    row: int
    anchor: bool
    tokens: int  # what its entries are counted from: of the block, or of the whole prefix


def items_of(offer: Offer, layout: Layout) -> list[Item]:
    """The records of an offer in the order of its blocks, each anchor after the block that it ends."""
    anchors = {anchor.key: anchor for anchor in offer.anchors}
    items = []
    for block in offer.blocks:
        name = pb.BlockName(key=block.key, tokens=np.asarray(block.tokens, "<u4").tobytes())
        record = pb.RecordOffer(kind=pb.RECORD_KIND_BLOCK, name=name, parent_key=block.parent, size=layout.block_bytes)
        items.append(Item(record, block.block, anchor=False, tokens=layout.block_tokens))
        anchor = anchors.get(block.key)
        if anchor is not None:
            record = pb.RecordOffer(
                kind=pb.RECORD_KIND_ANCHOR, name=name, parent_key=block.parent, size=layout.window_bytes
            )
            items.append(Item(record, anchor.slot, anchor=True, tokens=anchor.tokens))
    return items


def writes_of(items: Sequence[Item], offsets: Sequence[int], landing: Landing, regions: PoolRegions) -> list[Write]:
    """One array of descriptors for all blocks, one for the anchors."""
    layout, writes = regions.pool.layout, []
    for anchor, region, size in (
        (False, regions.blocks, layout.block_bytes),
        (True, regions.slots, layout.window_bytes),
    ):
        chosen = [index for index, item in enumerate(items) if item.anchor is anchor]
        rows = np.array([items[index].row for index in chosen], dtype=np.int64)
        places = np.array([offsets[index] for index in chosen], dtype=np.int64)
        sizes = np.full(len(chosen), size, dtype=np.int64)
        if chosen and region is not None:
            writes.append(plan.write_to(landing, region, rows * size, places, sizes))
    return writes


def fetch(items: Sequence[Item], regions: PoolRegions) -> None:
    """Brings the records into the host's memory, if they are elsewhere. Waits for the device."""
    blocks, slots = ([item.row for item in items if item.anchor is anchor] for anchor in (False, True))
    regions.pool.fetch(blocks, slots)


def seal(items: Sequence[Item], offsets: Sequence[int], regions: PoolRegions) -> list[list[Extent]]:
    """Each record's extents with the digests of its bytes as they are now. Reads them all."""
    return [_sealed(item, offset, regions) for item, offset in zip(items, offsets, strict=True)]


def _sealed(item: Item, offset: int, regions: PoolRegions) -> list[Extent]:
    pool, layout = regions.pool, regions.pool.layout
    view = pool.slot_extent if item.anchor else pool.block_extent
    places = record_places(layout.windows if item.anchor else layout.globals, item.tokens, offset)
    return [place.sealed(digest(view(place.group, item.row))) for place in places]
