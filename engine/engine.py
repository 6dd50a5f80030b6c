"""Engine: the loop schedule -> run -> commit over one model. Single-threaded; knows no network and no event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch

from engine import threads
from engine.assembly import assemble
from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.cache.staging import Allocate
from engine.checkpoint.progress import load_bar
from engine.commit import Committer
from engine.config import EngineConfig
from engine.detokenize import Decode, open_tokenizer
from engine.errors import DuplicateRequest, Exhausted, ForwardFailed, UnknownRequest
from engine.events import Event, Failed, Finished, Preempted
from engine.families import TakesImages, open_family
from engine.graphs import DecodeGraphs, Decodes
from engine.intake import Intake
from engine.memory import KVMemory
from engine.model import ModelInfo, model_revision
from engine.offers import Offers
from engine.prefix import Salt
from engine.requests import (
    DecodeRequest,
    GenerateRequest,
    HeldKV,
    Load,
    LocalPrefix,
    PrefillRequest,
    Reservation,
    SealedKV,
)
from engine.sampling.logits import Logits
from engine.scheduler import Plan, Scheduler, SchedulerPolicy
from engine.sealing import Sealer
from engine.sequence import Phase, Role, Sequence
from engine.stats import Counters, EngineStats
from engine.stops import FinishReason
from engine.transfer import TransferDesk
from engine.warm_up import warm_up
from engine.windows import served
from kernels import choose


class Runs(Protocol):
    """The part of a model family that a step needs."""

    def forward(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        """Logits, fp32 `[len(batch.logit_rows), vocab]`; writes all new KV into `cache`."""


class Engine:
    """Runs requests in three lives: whole, prefill-then-hold, and reserve -> import -> decode."""

    def __init__(
        self,
        family: Runs,
        pool: CachePool,
        model: ModelInfo,
        config: EngineConfig,
        decode: Decode | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.pool, self.config = model, pool, config
        self._family, self._clock, self._threads = family, clock, threads.ThreadChoice()
        captured = isinstance(family, Decodes) and family.captures and config.graphs and pool.blocks.is_cuda
        self.graphs = DecodeGraphs(family, pool, config.max_sequences) if captured else None
        num_blocks, num_slots = pool.blocks.shape[0], pool.slots.shape[0]
        layout = model.layout
        self.memory = KVMemory(num_blocks, num_slots, layout.block_tokens, layout.anchored, layout.replay.tokens)
        policy = SchedulerPolicy(
            config.max_batch_tokens, config.max_sequences, config.max_waiting, config.anchor_every_blocks
        )
        self._scheduler = Scheduler(policy, self.memory, clock)
        self._intake = Intake(model, num_blocks, decode, clock)
        self._desk = TransferDesk(self.memory, self._intake)
        self.offers = Offers(self.memory, layout, config.offers, clock)
        self.memory.give_way = self.offers.give_way
        every = config.offers.every_blocks(layout, config.anchor_every_blocks)
        self._sealer = Sealer(self.memory, pool.copy_slot, config.anchor_every_blocks, self.offers, every)
        self._counters = Counters()
        self._committer = Committer(model.eos_token_ids, self._sealer, self._counters)
        self._sequences: dict[str, Sequence] = {}
        self._outbox: list[Event] = []
        self.batch_tokens = 0  # tokens that the last step computed
        self.blocked = False  # the last step found work and room for none of it: only a release or a cancel helps

    @classmethod
    def open(
        cls, config: EngineConfig, clock: Callable[[], float] = time.monotonic, allocate: Allocate | None = None
    ) -> Engine:
        """Load the model of `config`, with a cache pool in memory from `allocate`, if that is given and it is the
        host's. A model without tokenizer.json opens, and refuses stop strings.

        Raises InvalidParameter for a wrong setting, CheckpointError for a wrong model and KernelError for kernels that
        cannot run here; each says what to do.
        """
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        dtype: torch.dtype = getattr(torch, config.dtype)
        ops = choose(config.kernels, config.device, config.batch_invariant, config.keeps_stored, config.keeps_records)
        threads.use(ops.device)
        with load_bar(config.model_dir.name) as progress:
            family = open_family(config.model_dir, dtype, config.batch_invariant, ops, config.block_tokens, progress)
        model = ModelInfo(
            config.model_name or config.model_dir.name,
            model_revision(config.model_dir),
            family.name,
            family.vocab_size,
            family.max_context_tokens,
            family.eos_token_ids,
            served(family.layout, config.window_state, family.max_context_tokens),
            family.image_input if isinstance(family, TakesImages) else None,
        )
        pool = CachePool(model.layout, *config.memory(model.layout), dtype, ops.device, allocate)
        tokenizer = config.model_dir / "tokenizer.json"
        engine = cls(family, pool, model, config, open_tokenizer(tokenizer) if tokenizer.exists() else None, clock)
        warm_up(engine)
        engine._counters.reset()
        return engine

    # --- lives -----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request for its whole life. Raises InvalidParameter, DuplicateRequest or Exhausted."""
        self._queue(request, Role.WHOLE)

    def submit_prefill(self, request: PrefillRequest) -> None:
        """Queue a prefill: ChunkDone per chunk, then FirstToken, then its KV is held until `release`.

        Where decode replays the last window, EntriesReady stands in for FirstToken; not with `prompt_logprobs`.

        Raises InvalidParameter, DuplicateRequest or Exhausted.
        """
        self._queue(request, Role.PREFILL)

    def reserve(
        self,
        request_id: str,
        prompt_tokens: int,
        max_total_tokens: int,
        salt: Salt = b"",
        prompt: tuple[int, ...] | None = None,
    ) -> Reservation:
        """Take memory for the KV of `prompt_tokens` tokens (prompt and output of earlier lives) that is to be imported.

        With `prompt` (exactly those tokens) the verified prefix that is cached here is shared and counted as held.
        Raises InvalidParameter, DuplicateRequest, or Exhausted if there is no room now.
        """
        self._require_new(request_id)
        live = len(self._scheduler.waiting) + len(self._scheduler.running) + self._desk.reserved
        if live >= self.config.max_sequences:
            raise Exhausted("sequences", needed=1, free=0)
        return self._desk.reserve(request_id, prompt_tokens, max_total_tokens, salt, prompt)

    def start_decode(self, request: DecodeRequest) -> None:
        """Decode from a reservation whose KV is imported and verified: from now on its full blocks may be hit.

        Raises InvalidParameter, or NotReserved if the tokens do not match the reservation, which then stays open.
        """
        sequence = self._intake.sequence(request, Role.DECODE)
        reservation = self._desk.claim(request)
        held_blocks = reservation.held_tokens // self.memory.block_tokens
        self.pool.upload(reservation.blocks[held_blocks:], (reservation.slot,))
        sequence.blocks, sequence.slot = list(reservation.blocks), reservation.slot
        sequence.computed_tokens, sequence.cached_tokens = reservation.kv_tokens, 0
        sequence.offered_blocks = reservation.kv_tokens // self.memory.block_tokens  # by who computed them
        self._sequences[request.request_id] = sequence
        self._scheduler.start(sequence)
        self._sealer.seal(sequence, decoding=False)
        if request.replays:
            sequence.replay_hit, sequence.computed_tokens = self.memory.resume(reservation.kv_tokens)
        if sequence.stop is not None:
            self._outbox.append(self._finished(sequence))

    def cancel(self, request_id: str) -> None:
        """End a request wherever it stands and free what it holds. Idempotent.

        A request that waits or runs then gets a Finished event; one that is held or only reserved gets none.
        """
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.phase is not Phase.HELD:
            self._end(sequence)
            self._outbox.append(Finished(request_id, FinishReason.CANCELLED, sequence.usage, None))
        self.release(request_id)

    def hold(self, request_id: str) -> None:
        """Compute no more of a request; what it holds stays until `release`. Without an event. Idempotent."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._scheduler.remove(sequence, Phase.HELD)

    def release(self, request_id: str) -> None:
        """Free what a request holds, in whatever phase, without an event. Idempotent."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence)
        self._desk.release(request_id)
        self._check_idle()

    def pause(self, request_id: str, paused: bool) -> None:
        """Stop or resume stepping a request whose reader is behind. A paused one is the first to lose its memory."""
        if request_id in self._sequences:
            self._sequences[request_id].paused = paused

    # --- what a request holds --------------------------------------------------------------------------------------

    def held(self, request_id: str) -> HeldKV:
        """Block table and slot of a request or reservation. Raises UnknownRequest if it holds none now."""
        reservation = self._desk.reservation(request_id)
        if reservation is not None:
            return HeldKV(reservation.blocks, reservation.slot, reservation.held_tokens)
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.slot is None:
            raise UnknownRequest(request_id)
        return HeldKV(tuple(sequence.blocks), sequence.slot, sequence.computed_tokens)

    def sealed(self, request_id: str) -> SealedKV:
        """Full blocks and anchor of a request, for a store; empty without `cache`. Raises UnknownRequest."""
        if request_id not in self._sequences:
            raise UnknownRequest(request_id)
        return self._sealer.sealed(self._sequences[request_id])

    # --- blocks that come from a store -----------------------------------------------------------------------------

    def lookup(self, prompt: tuple[int, ...], salt: Salt = b"") -> LocalPrefix:
        """Keys of a prompt's full blocks and how far this engine has them. Raises InvalidParameter."""
        return self._desk.lookup(prompt, salt)

    def begin_load(self, prompt: tuple[int, ...], salt: Salt, from_block: int, to_block: int) -> Load:
        """Take fresh blocks and an anchor slot for stored blocks `from_block..to_block` of a prompt.

        Fill them through the pool's extents, verify them, then `finish_load` or `abandon_load`. Raises
        InvalidParameter if the range is wrong or blocks before it are not cached, Exhausted if there is no room.
        """
        return self._desk.begin_load(prompt, salt, from_block, to_block)

    def finish_load(self, load: Load, ok_blocks: int, anchor_ok: bool = True) -> LocalPrefix:
        """Cache the first `ok_blocks` loaded blocks, all of them verified, and the anchor if everything was.

        Returns what the prompt would hit now. Raises InvalidParameter if the load is not open or the count is wrong.
        """
        local = self._desk.finish_load(load, ok_blocks, anchor_ok)
        # No step has run since: what was not adopted is nobody's yet.
        self.pool.upload(load.blocks[:ok_blocks], (load.slot,) if anchor_ok else ())
        self._check_idle()
        return local

    def abandon_load(self, load: Load) -> None:
        """Give a load's memory back. Idempotent."""
        self._desk.abandon_load(load)
        self._check_idle()

    # --- the loop --------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could change anything."""
        return bool(self._outbox) or self._scheduler.has_work

    def step(self) -> list[Event]:
        """Schedule, run and commit once. Returns what happened since the last step; empty if nothing could run."""
        threads.use(self.pool.blocks.device)
        events, self._outbox = self._outbox, []
        plan = self._scheduler.plan()
        events.extend(self._preempted(plan.preempted))
        if plan.chunks:
            self._restore(plan)
            events.extend(self._run(plan))
        self.batch_tokens = sum(chunk.count for chunk in plan.chunks)
        self.blocked = not events and not plan.chunks
        self._counters.steps += 1
        self._check_idle()
        return events

    def stats(self) -> EngineStats:
        """A snapshot for metrics and load reports."""
        blocks, slots, counters = self.memory.blocks, self.memory.slots, self._counters
        return EngineStats(
            waiting=len(self._scheduler.waiting),
            running=len(self._scheduler.running),
            held=sum(one.phase is Phase.HELD for one in self._sequences.values()),
            reserved=self._desk.reserved,
            loading=self._desk.loading,
            queued_tokens=self._scheduler.queued_tokens,
            oldest_wait_s=self._scheduler.oldest_wait_s,
            blocks_total=blocks.total,
            blocks_free=blocks.free,
            blocks_cached=blocks.cached,
            blocks_held=blocks.held,
            slots_total=slots.total,
            slots_free=slots.free,
            slots_cached=slots.cached,
            slots_held=slots.held,
            anchors=self.memory.index.anchors,
            steps=counters.steps,
            computed_tokens=counters.computed_tokens,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
            finished=counters.finished,
            failed=counters.failed,
            offers=len(self.offers),
            offers_bytes=self.offers.waiting_bytes,
            offers_refused=self.offers.counts.refused,
            offers_late=self.offers.counts.late,
            offers_taken_back=self.offers.counts.taken_back,
        )

    def _run(self, plan: Plan) -> list[Event]:
        batch, rows = assemble(plan.chunks, self.model.layout)
        try:
            with torch.inference_mode():
                logits = self._logits(batch, plan)
        except Exception as error:  # whatever a request makes the model raise must not take the others along
            return self._isolate(plan, error)
        events = self._committer.commit(rows, logits)
        for event in [event for event in events if isinstance(event, Failed)]:
            self._discard(self._sequences[event.request_id])
        for sequence in [chunk.sequence for chunk in plan.chunks]:
            if sequence.role is Role.PREFILL and sequence.begun:
                self._scheduler.remove(sequence, Phase.HELD)
            elif sequence.stop is not None:
                events.append(self._finished(sequence))
        return events

    def _logits(self, batch: RaggedBatch, plan: Plan) -> Logits:
        if self.graphs is not None and self.graphs.takes(batch):
            return self.graphs.run(batch, [chunk.sequence.row for chunk in plan.chunks], self._scheduler.goes_on(plan))
        work = partial(self._family.forward, batch, self.pool)
        return Logits(threads.run(self._threads, len(batch.tokens), self._clock, work))

    def _restore(self, plan: Plan) -> None:
        for restore in plan.restores:
            assert restore.sequence.slot is not None  # noqa: S101  narrows the type: it was just admitted
            self.pool.copy_slot(restore.anchor_slot, restore.sequence.slot)
            self._scheduler.restored(restore)

    def _isolate(self, plan: Plan, error: Exception) -> list[Event]:
        """A lone sequence whose pass raised fails. Of several, each is recomputed alone up to the step that raised.

        Rings and open states may be half overwritten, so none of them can simply go on.
        """
        if len(plan.chunks) == 1:
            sequence = plan.chunks[0].sequence
            self._discard(sequence)
            failure = ForwardFailed(f"request {sequence.request_id!r}: the model raised {error!r}")
            failure.__cause__ = error
            return [Failed(sequence.request_id, failure)]
        for chunk in plan.chunks:
            chunk.sequence.suspect_tokens = chunk.end
            self._scheduler.preempt(chunk.sequence)
        return self._preempted([chunk.sequence for chunk in plan.chunks])

    def _preempted(self, sequences: Iterable[Sequence]) -> list[Event]:
        events: list[Event] = [Preempted(sequence.request_id) for sequence in sequences]
        self._counters.preemptions += len(events)
        return events

    def _finished(self, sequence: Sequence) -> Finished:
        assert sequence.stop is not None  # noqa: S101  narrows the type: callers looked
        self._end(sequence)
        self._counters.finished += 1
        return Finished(sequence.request_id, sequence.stop.reason, sequence.usage, sequence.stop.match)

    def _discard(self, sequence: Sequence) -> None:
        """End a failed sequence; what it cached may be wrong and must not be hit."""
        self._counters.failed += 1
        self.memory.index.distrust(sequence.chain)
        sequence.offer_as = None
        self.offers.forget(sequence.request_id)
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._sealer.offer(sequence)
        self._scheduler.remove(sequence, Phase.ENDED)
        del self._sequences[sequence.request_id]

    def _queue(self, request: GenerateRequest | PrefillRequest, role: Role) -> None:
        self._require_new(request.request_id)
        sequence = self._intake.sequence(request, role)
        self._scheduler.add(sequence)
        self._sequences[request.request_id] = sequence

    def _require_new(self, request_id: str) -> None:
        if request_id in self._sequences or self._desk.reservation(request_id) is not None:
            raise DuplicateRequest(request_id)

    def _check_idle(self) -> None:
        """A self-check for free: when nobody is alive, nothing may be held."""
        if not self._sequences and not self._desk.reserved and not self._desk.loading and not self.offers:
            self.memory.check_idle()
