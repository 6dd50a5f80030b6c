"""Receipts: what prefill says it wrote, and whether that is all decode needs. Knows geometry; reads no KV bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.sampling.logprobs import TokenLogprob
from engine.sampling.params import SamplingState
from fabric.errors import DataLoss, InvalidArgument
from fabric.records import Extent
from services.worker.geometry import Handoff


@dataclass(frozen=True, slots=True)
class Receipt:
    """The neutral form of `deepinfer.v1.Receipt`, one landing.

    It ends with the token that prefill drew, or with the position that decode replays from: exactly one is not None.
    """

    ticket_id: str
    request_id: str
    epoch: int
    model_revision: str
    layout_fingerprint: str
    tokens: int
    extents: tuple[Extent, ...]
    first_token: int | None
    state: SamplingState
    logprob: TokenLogprob | None = None
    replay_from: int | None = None


def require_complete(receipt: Receipt, handoff: Handoff) -> None:
    """Checks that the receipt names every extent of `handoff` exactly once, where and as full as the layout says.

    Window groups are among them unless decode replays.

    Raises:
        DataLoss: an extent is missing, doubled, misplaced or not as full as it must be.
        InvalidArgument: the receipt is about a prompt of another length, or about a replay that the layout has not.
    """
    if receipt.tokens != handoff.tokens:
        raise InvalidArgument(
            f"the receipt covers {receipt.tokens} tokens, the prompt has {handoff.tokens}",
            field="receipt.tokens",
            fix="send the receipt of this request",
        )
    if receipt.replay_from is not None:
        _require_replay(receipt.replay_from, handoff)
        handoff = replace(handoff, windows=False)
    require_extents(receipt.extents, handoff)


def _require_replay(position: int, handoff: Handoff) -> None:
    policy = handoff.layout.replay
    if not policy.handoff or position != policy.start(handoff.tokens):
        wanted = f"replay from {policy.start(handoff.tokens)}" if policy.handoff else "hand the windows over"
        raise InvalidArgument(
            f"a replay from {position} is not what this layout has", field="receipt.replay_from", fix=wanted
        )


def require_extents(extents: Sequence[Extent], handoff: Handoff) -> None:
    """Raises DataLoss unless `extents` are exactly the places of `handoff`, in any order, each as full as needed."""
    named = {(extent.group, extent.block): extent for extent in extents}
    places = tuple(handoff.places())
    if len(named) != len(extents) or len(named) != len(places):
        raise _incomplete(f"{len(extents)} extents are named, {len(places)} are needed")
    for place in places:
        extent = named.get((place.group, place.block))
        if extent is None or not place.is_of(extent):
            raise _incomplete(f"block {place.block} of {place.group} is missing or not as it must be")


def require_verified(extents: Sequence[Extent], verified: Mapping[tuple[str, int], tuple[int, int, int]]) -> None:
    """Raises DataLoss unless every extent is among those that were verified where they arrived.

    `verified` has (valid entries, size, digest) by (group, block).
    """
    for extent in extents:
        if verified.get((extent.group, extent.block)) != (extent.valid_entries, extent.size, extent.digest):
            raise DataLoss(
                f"group {extent.group} block {extent.block} is not what was verified",
                field="digest",
                fix="prefill the prompt again",
            )


def _incomplete(message: str) -> DataLoss:
    return DataLoss(message, field="extents", fix="prefill the prompt again")
