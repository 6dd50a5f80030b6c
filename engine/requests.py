"""Requests and what they hold: the values that cross the engine's boundary. Knows no state."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.images import ImageSpan
from engine.prefix import Salt
from engine.sampling.params import SamplingParams, SamplingState


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A whole life in one process. `emitted` are output tokens of an earlier life that this one continues."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: Salt = b""
    cache: bool = True  # read and fill the prefix cache
    priority: int = 0  # from -8 to 8; one point passes 64 earlier requests
    emitted: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()  # of the prompt, in order
    offer_as: object | None = None  # not None: what is sealed is offered to a store, with this beside it


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Compute the KV of `prompt + emitted`, sample the next token, then hold the KV until `release`.

    A stream that migrates under another request id passes its old seed in `sampling.seed`.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: Salt = b""
    cache: bool = True
    priority: int = 0
    emitted: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()  # of the prompt, in order
    offer_as: object | None = None  # not None: what is sealed is offered to a store, with this beside it


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Continue from imported KV. `emitted` ends with the token that prefill sampled; the KV covers all before it.

    With `replays` prefill sampled none and the KV is global entries alone, of every token: the last window is replayed.
    """

    request_id: str
    prompt: tuple[int, ...]
    emitted: tuple[int, ...]
    sampling: SamplingParams
    state: SamplingState
    salt: Salt = b""
    cache: bool = True
    priority: int = 0
    replays: bool = False
    images: tuple[ImageSpan, ...] = ()  # of the prompt, in order
    offer_as: object | None = None  # not None: what is sealed is offered to a store, with this beside it


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory taken for an import: a block table for the tokens to come, a window slot, and what is here already."""

    request_id: str
    blocks: tuple[int, ...]  # the first held_tokens / block_tokens of them are shared: never write into those
    slot: int
    kv_tokens: int  # tokens whose KV must be imported or held before decoding starts
    held_tokens: int  # verified prefix, whole blocks, that needs no import


@dataclass(frozen=True, slots=True)
class HeldKV:
    """Where a request's KV lies in the cache pool. Valid until the request is released, cancelled or preempted."""

    block_table: tuple[int, ...]
    slot: int
    tokens: int  # tokens whose KV is computed


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A full, immutable block of a request with its prefix key."""

    index: int
    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    block: int


@dataclass(frozen=True, slots=True)
class Anchor:
    """A window slot that holds the window groups at a block boundary."""

    slot: int
    tokens: int
    key: bytes  # key of the block that ends there


@dataclass(frozen=True, slots=True)
class SealedKV:
    """What of a request may be stored: its full blocks and its last anchor, both held until the request is released."""

    blocks: tuple[SealedBlock, ...]
    cached_blocks: int  # found when it was first admitted, not computed by it: after a preemption more than `blocks`
    anchor: Anchor | None


@dataclass(frozen=True, slots=True)
class LocalPrefix:
    """What the prefix cache has of a prompt, at this moment."""

    keys: tuple[bytes, ...]  # of every full block of the prompt
    matched_blocks: int
    hit_tokens: int  # up to the last usable anchor


@dataclass(frozen=True, slots=True)
class Load:
    """Fresh memory to be filled with stored blocks `from_block..to_block` and the anchor at the end of the last."""

    load_id: int
    blocks: tuple[int, ...]
    slot: int
    from_block: int
    to_block: int
    keys: tuple[bytes, ...]  # of the blocks to load
