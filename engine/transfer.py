"""Transfers: memory that waits for bytes from elsewhere, reserved for a decode or being loaded from a store.

Knows who owns which ids until the bytes are verified. Never sees the bytes, and lets nothing unverified into the index.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import DuplicateRequest, InvalidParameter, NotReserved
from engine.intake import Intake
from engine.memory import KVMemory
from engine.prefix import KeyChain, Salt
from engine.requests import DecodeRequest, Load, LocalPrefix, Reservation
from engine.sampling.params import is_integer


@dataclass(frozen=True, slots=True)
class _Reserved:
    reservation: Reservation
    prompt: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Loading:
    load: Load
    chain: KeyChain
    prompt_tokens: int
    parents: tuple[int, ...]


class TransferDesk:
    """Owns reservations and loads; every one ends by `claim`, `release`, `finish` or `abandon`."""

    def __init__(self, memory: KVMemory, intake: Intake) -> None:
        self._memory, self._intake = memory, intake
        self._reserved: dict[str, _Reserved] = {}
        self._loading: dict[int, _Loading] = {}
        self._loads = 0

    @property
    def reserved(self) -> int:
        """Reservations that were neither started nor released."""
        return len(self._reserved)

    @property
    def loading(self) -> int:
        """Loads that were neither finished nor abandoned."""
        return len(self._loading)

    def reservation(self, request_id: str) -> Reservation | None:
        """The open reservation of a request."""
        reserved = self._reserved.get(request_id)
        return reserved.reservation if reserved else None

    def reserve(
        self, request_id: str, kv_tokens: int, max_total_tokens: int, salt: Salt, tokens: tuple[int, ...] | None
    ) -> Reservation:
        """Take blocks for `kv_tokens` tokens and a slot. See `Engine.reserve`."""
        self._check(request_id, kv_tokens, max_total_tokens, tokens)
        held = self._memory.match(self._intake.chain(salt, tokens)) if tokens else ()
        fresh = self._memory.blocks_for(kv_tokens) - len(held)
        try:
            taken, (slot,) = self._memory.take(fresh, 1)
        except Exception:
            self._memory.give(held)
            raise
        held_tokens = len(held) * self._memory.block_tokens
        reservation = Reservation(request_id, (*held, *taken), slot, kv_tokens, held_tokens)
        self._reserved[request_id] = _Reserved(reservation, tokens)
        return reservation

    def claim(self, request: DecodeRequest) -> Reservation:
        """Hand a reservation over to the sequence that decodes from it. Raises NotReserved if they do not match."""
        reserved = self._reserved.get(request.request_id)
        if reserved is None:
            raise NotReserved(request.request_id, "there is no reservation")
        tokens = (*request.prompt, *request.emitted)
        tokens = tokens if request.replays else tokens[:-1]
        if len(tokens) != reserved.reservation.kv_tokens:
            have = reserved.reservation.kv_tokens
            raise NotReserved(request.request_id, f"{have} tokens were reserved, KV covers {len(tokens)}")
        if reserved.prompt is not None and reserved.prompt != tokens:
            raise NotReserved(request.request_id, "the tokens differ from the reserved ones")
        return self._reserved.pop(request.request_id).reservation

    def release(self, request_id: str) -> bool:
        """Give a reservation's memory back; whether there was one."""
        reserved = self._reserved.pop(request_id, None)
        if reserved is not None:
            self._memory.give(reserved.reservation.blocks, (reserved.reservation.slot,))
        return reserved is not None

    def lookup(self, prompt: tuple[int, ...], salt: Salt) -> LocalPrefix:
        """What the prefix cache has of `prompt` now."""
        self._intake.check_tokens("prompt", prompt)
        return self._local(self._intake.chain(salt, prompt), len(prompt))

    def begin_load(self, prompt: tuple[int, ...], salt: Salt, from_block: int, to_block: int) -> Load:
        """Take memory for blocks `from_block..to_block`. See `Engine.begin_load`."""
        self._intake.check_tokens("prompt", prompt)
        chain = self._intake.chain(salt, prompt)
        if not is_integer(to_block) or not is_integer(from_block) or not 0 <= from_block < to_block <= len(chain.keys):
            raise InvalidParameter(
                "to_block", f"blocks {from_block}..{to_block} are no range", f"stay within 0..{len(chain.keys)}"
            )
        matched = self._memory.match(chain)
        try:
            if len(matched) < from_block:
                raise InvalidParameter("from_block", f"only {len(matched)} blocks are cached", "load from there")
            taken, (slot,) = self._memory.take(to_block - from_block, 1)
        except Exception:
            self._memory.give(matched)
            raise
        self._loads += 1
        load = Load(self._loads, taken, slot, from_block, to_block, tuple(chain.keys[from_block:to_block]))
        self._loading[load.load_id] = _Loading(load, chain, len(prompt), matched)
        return load

    def finish_load(self, load: Load, ok_blocks: int, anchor_ok: bool) -> LocalPrefix:
        """Cache the first `ok_blocks` blocks, which the caller has verified. See `Engine.finish_load`."""
        loading = self._loading.get(load.load_id)
        if loading is None:
            raise InvalidParameter("load", f"load {load.load_id} is not open", "begin a new one")
        if not is_integer(ok_blocks) or not 0 <= ok_blocks <= len(load.blocks):
            raise InvalidParameter("ok_blocks", f"{ok_blocks} is out of range", f"use 0 to {len(load.blocks)}")
        index = self._memory.index
        index.insert(loading.chain, load.from_block, loading.load.blocks[:ok_blocks])
        if anchor_ok and ok_blocks == len(load.blocks):
            index.anchor(loading.chain, load.to_block - 1, loading.load.slot)
        self.abandon_load(load)
        return self._local(loading.chain, loading.prompt_tokens)

    def abandon_load(self, load: Load) -> None:
        """Give a load's memory back; nothing happens if it already ended."""
        loading = self._loading.pop(load.load_id, None)
        if loading is not None:
            self._memory.give((*loading.parents, *loading.load.blocks), (loading.load.slot,))

    def _local(self, chain: KeyChain, prompt_tokens: int) -> LocalPrefix:
        matched, hit = len(self._memory.index.match(chain)), self._memory.look(chain, prompt_tokens)
        return LocalPrefix(tuple(chain.keys), matched, len(hit.blocks) * self._memory.block_tokens)

    def _check(self, request_id: str, kv_tokens: int, max_total_tokens: int, tokens: tuple[int, ...] | None) -> None:
        if request_id in self._reserved:
            raise DuplicateRequest(request_id)
        if not is_integer(kv_tokens) or kv_tokens < 1:
            raise InvalidParameter(
                "prompt_tokens", f"{kv_tokens} is not a positive integer", "count the prompt's tokens"
            )
        if not is_integer(max_total_tokens) or max_total_tokens <= kv_tokens:
            raise InvalidParameter("max_total_tokens", "leaves no token to decode", f"use more than {kv_tokens}")
        self._intake.check_size("max_total_tokens", max_total_tokens)
        if tokens is not None:
            self._intake.check_tokens("prompt", tokens)
            if len(tokens) != kv_tokens:
                raise InvalidParameter("prompt", f"has {len(tokens)} tokens, not {kv_tokens}", "send both alike")
