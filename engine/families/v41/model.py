"""V4.1's forward over paged caches: any mixture of prefill chunks and decode steps. Knows layers; owns no cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.batch import RaggedBatch, Replay
from engine.cache.pool import CachePool
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.reader import Progress, Reader
from engine.families.fields import refusal
from engine.families.replay import is_over, resumed
from engine.families.rotary import GrowingRope
from engine.families.v4.ragged import check, ragged
from engine.families.v41.attention import Attention, Shared
from engine.families.v41.config import V41Config, parse
from engine.families.v41.hashing import EngramHash
from engine.families.v41.layout import HISTORY, WINDOW, record_layout, v41_layout
from engine.families.v41.memory import EngramMemory
from engine.families.v41.names import upstream
from engine.families.v41.normalise import load_classes
from engine.families.v41.options import Options, parse_options, require_widths
from engine.families.v41.recall import Recall
from engine.families.v41.replay import kept_rows, query_rows, require_fit, upper_rows
from engine.families.v41.weights import EngramWeights, Layer, V41Weights, build
from engine.images import ImageInput, ImageRows
from kernels import Ops
from kernels.csa2 import csa2_ops
from kernels.operands import Ragged
from kernels.staging import on_device, tokens_of

Probe = Callable[[str, int, Any], None]  # what was computed, in which layer, its value


def load(
    folder: Folder, dtype: torch.dtype, batch_invariant: bool, ops: Ops, block_tokens: int, progress: Progress | None
) -> V41:
    """Build the model from a folder; raises CheckpointError, naming file and tensor, for what cannot be served.

    `batch_invariant` asks for nothing more: the forward is as invariant as its operators. Those of V4.1 alone are so on
    the CPU only: a GPU's library sums rows in an order that depends on how many there are.
    """
    if batch_invariant and ops.device.type != "cpu":
        message, fix = f"V4.1 is not batch invariant on {ops.device}", "choose device=cpu or batch_invariant=False"
        raise CheckpointError(message, file=folder.path, item="batch_invariant", fix=fix)
    config, options = parse(folder.config), parse_options(folder.config)
    if ops.records:
        require_widths(config)
    memory = _memory(folder, config, ops)
    weights = build(Reader(folder, upstream, progress, ops.device), config, ops, dtype)
    tables = [layer.engram.table for layer in weights.layers if layer.engram]
    recall = memory.recall(tables) if memory and Recall.fits(tables, ops.device) else None
    return V41(config, options, weights, memory, recall, dtype, ops, block_tokens)


@dataclass(frozen=True, slots=True)
class _Upper:
    """The rows that go above the last entry source, and what they are there."""

    kept: np.ndarray  # int64 [rows], ascending
    rows: Ragged


@dataclass(slots=True)
class _Flow:
    """What runs through the layers, for the rows in play."""

    x: torch.Tensor  # [rows, streams, hidden]
    pre: torch.Tensor  # [rows, streams] how the next site collapses the streams
    rows: Ragged
    dead: torch.Tensor  # bool [rows] image positions
    table_rows: torch.Tensor  # int64 [rows, Engram layers, columns]; no layers without Engram
    shared: Shared
    images: bool  # whether a row may be dead

    def keep(self, upper: _Upper) -> None:
        """Go on with the kept rows only; nothing shared is left, as the layer at hand publishes anew."""
        kept = torch.from_numpy(upper.kept)
        self.x, self.pre, self.dead, self.rows = self.x[kept], self.pre[kept], self.dead[kept], upper.rows
        self.table_rows = self.table_rows[kept]
        self.shared = Shared()


class V41:
    """A loaded DeepSeek-V4.1 (text). Its only state besides the weights are rotary tables, which grow.

    `probe`, where set, is told intermediate values; nothing is computed for it alone while it is None.
    """

    name = "deepseek_v41"
    draft = None  # its drafter is of another kind, and not built

    def __init__(
        self, config: V41Config, options: Options, weights: V41Weights, memory: EngramMemory | None,
        recall: Recall | None, dtype: torch.dtype, ops: Ops, block_tokens: int,
    ) -> None:  # fmt: skip
        self.config, self.options, self.weights, self.kernels = config, options, weights, ops.name
        if ops.records:
            self.layout = record_layout(config, options, block_tokens)
        else:
            self.layout = v41_layout(config, options, str(dtype).removeprefix("torch."), block_tokens)
        self.vocab_size, self.max_context_tokens = config.vocab_size, config.max_context_tokens
        self.eos_token_ids = config.eos_token_ids
        self.image_input = None if config.image_token is None else ImageInput(config.image_token, config.hidden)
        self.probe: Probe | None = None
        rounds = options.fake_quantize and not ops.records
        self.captures = ops.captures and not rounds and (memory is None or recall is not None)
        self._memory, self._recall, self._ops, self._csa2 = memory, recall, ops, csa2_ops(ops.name)
        self._attention = Attention(config, options, ops, self._csa2, dtype)
        self._main = GrowingRope(config.main_rope, config.rope_dim, device=ops.device)
        self._compressed = GrowingRope(config.compress_rope, config.rope_dim, device=ops.device)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        """Logits fp32 [len(batch.logit_rows), vocabulary]; writes every new record into `cache`.

        Exact for any chunking, and with `batch.replay` a function of it and the tokens for any chunking. Raises
        ValueError for a batch that does not fit the cache.
        """
        check(batch, cache, self.vocab_size, self.max_context_tokens)
        self._ops.begin()
        rows = ragged(batch, self.config.schedule.ratios)
        if batch.replay is not None:
            require_fit(batch.replay, batch, self._memory.before if self._memory else 0)
            rows = resumed(rows, batch.replay)
        flow = self._enter(rows, batch.images, cache, batch.replay)
        upper = self._upper(rows, batch.replay)
        for index, layer in enumerate(self.weights.layers):
            last = index == self.config.schedule.last_source
            self._layer(flow, index, layer, cache, upper if last else None)
            if not flow.rows.rows:
                break
        wanted = np.asarray(batch.logit_rows, np.int64)
        if not len(wanted):
            return flow.x.new_empty(0, self.vocab_size)
        at = torch.from_numpy(wanted if upper is None else np.searchsorted(upper.kept, wanted))
        return self._logits(flow.x[at], flow.pre[at])

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """As kernels.likeliest.likeliest."""
        return self._ops.likeliest(logits)

    def decodes(self, batch: RaggedBatch) -> bool:
        """As engine.graphs.Decodes.decodes."""
        return is_over(batch.replay, batch) and not bool((batch.tokens == self._image_token).any())

    def plan(self, batch: RaggedBatch, cache: CachePool) -> Ragged:
        """As engine.graphs.Decodes.plan, for batches that `decodes`."""
        check(batch, cache, self.vocab_size, self.max_context_tokens)
        return ragged(batch, self.config.schedule.ratios)

    @torch.inference_mode()
    def decode(self, rows: Ragged, cache: CachePool) -> torch.Tensor:
        """As engine.graphs.Decodes.decode. Rotary tables are made whole, for a graph remembers where they are."""
        for growing in (self._main, self._compressed):
            growing.upto(self.max_context_tokens)
        embedded = self._embedded(rows)
        table_rows = embedded.new_empty(rows.rows, 0, 0, dtype=torch.int64)
        if self._recall:
            table_rows = self._recall.numbers(rows, cache.ring(HISTORY, 0))
        dead = torch.zeros(rows.rows, dtype=torch.bool, device=embedded.device)
        flow = self._flow(embedded, rows, dead, table_rows, images=False)
        for index, layer in enumerate(self.weights.layers):
            self._layer(flow, index, layer, cache, None)
        return self._logits(flow.x, flow.pre)

    def _logits(self, x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        hidden = self._csa2.hyper_collapse(x, pre, self.weights.norm, self.config.norm_eps)
        return self._ops.linear(hidden, self.weights.logits)

    @property
    def _image_token(self) -> int:
        return -1 if self.config.image_token is None else self.config.image_token

    def _embedded(self, rows: Ragged) -> torch.Tensor:
        return self.weights.embedding[tokens_of(rows, self._ops.device)].to(torch.float32)

    def _flow(
        self, embedded: torch.Tensor, rows: Ragged, dead: torch.Tensor, table_rows: torch.Tensor, images: bool
    ) -> _Flow:
        """Before the first layer the first stream alone is the block's input."""
        pre = embedded.new_zeros(rows.rows, self.config.streams)
        pre[:, 0] = 1.0
        x = embedded[:, None].repeat(1, self.config.streams, 1)
        return _Flow(x, pre, rows, dead, table_rows, Shared(), images)

    def _enter(self, rows: Ragged, images: ImageRows | None, cache: CachePool, replay: Replay | None) -> _Flow:
        """Embed tokens and images, and name the rows of the n-gram memory."""
        dead, embedded = rows.tokens == self._image_token, self._embedded(rows)
        if images is not None:
            embedded[torch.from_numpy(images.at)] = torch.from_numpy(images.values).to(embedded)
        table_rows = torch.empty(rows.rows, 0, 0, dtype=torch.int64)
        if self._memory:
            table_rows = self._memory.rows(rows, dead, cache.ring(HISTORY, 0), replay)
        self._tell("engram rows", -1, table_rows)
        return self._flow(embedded, rows, on_device(dead, embedded.device), table_rows, bool(dead.any()))

    def _upper(self, rows: Ragged, replay: Replay | None) -> _Upper | None:
        """The rows that go above the last entry source, None where that takes nothing from anybody."""
        if replay is None or self.config.schedule.last_source is None or not replay.upper.any():
            return None
        kept = kept_rows(rows, replay.upper)
        return _Upper(kept, upper_rows(rows, kept, replay.upper))

    def _layer(self, flow: _Flow, index: int, layer: Layer, cache: CachePool, upper: _Upper | None) -> None:
        """One layer in place. With `upper`, other rows end once this layer's keys and entries are written."""
        ops, csa2 = self._ops, self._csa2
        if layer.engram:
            self._remember(flow, layer.engram)
        self._tell("entering", index, flow.x)
        rope = (self._compressed if layer.role.ratio else self._main).upto(int(flow.rows.positions.max()) + 1)
        site = layer.attention_site
        keys = self._attention.keys(
            csa2.hyper_collapse(flow.x, flow.pre, site.norm, site.norm_eps), layer, flow.rows, cache, rope
        )
        keyed = asking = flow.rows
        if upper is not None:
            keys, asking = keys.of(torch.from_numpy(upper.kept)), query_rows(flow.rows, upper.kept)
            flow.keep(upper)
        if not asking.rows:
            self._attention.store(keys, index, keyed, cache)
            return
        stored = cache.ring(WINDOW, index).takes_first(keyed, self.config.window)
        if stored:
            self._attention.store(keys, index, keyed, cache)
        pre, post, comb = csa2.hyper_mix(flow.x, site)
        attended, flow.shared = self._attention.attend(keys, layer, index, asking, cache, rope, flow.shared)
        if not stored:
            self._attention.store(keys, index, keyed, cache)
        flow.x = ops.hyper_post(flow.x, attended, post, comb)
        site = layer.mlp_site
        hidden = csa2.hyper_collapse(flow.x, pre, site.norm, site.norm_eps)
        flow.pre, post, comb = csa2.hyper_mix(flow.x, site)
        chosen, weights = self._route(hidden, flow, layer)
        flow.x = ops.hyper_post(flow.x, ops.experts(hidden, chosen, weights, layer.experts), post, comb)
        self._tell("streams", index, flow.x)
        self._tell("pre", index, flow.pre)
        self._tell("shared", index, flow.shared)

    def _remember(self, flow: _Flow, engram: EngramWeights) -> None:
        """Add the n-gram memory to the streams."""
        if self._recall and flow.table_rows.device == flow.x.device:
            rows = self._recall.values(flow.table_rows, engram.place)
        else:
            rows = engram.table.rows(flow.table_rows[:, engram.place]).flatten(1).to(flow.x.device)
        flow.x = self._csa2.engram(flow.x, self._ops.linear(rows, engram.project), ~flow.dead, engram.gate)

    def _route(self, hidden: torch.Tensor, flow: _Flow, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Image positions choose experts with a bias of their own."""
        tokens = tokens_of(flow.rows, self._ops.device)
        chosen, weights = self._ops.route(hidden, tokens, layer.router)
        if not flow.images:
            return chosen, weights
        seen, seen_weights = self._ops.route(hidden, tokens, layer.image_router)
        dead = flow.dead[:, None]
        return torch.where(dead, seen, chosen), torch.where(dead, seen_weights, weights)

    def _tell(self, what: str, layer: int, value: Any) -> None:
        if self.probe is not None:
            self.probe(what, layer, value)


def _memory(folder: Folder, config: V41Config, ops: Ops) -> EngramMemory | None:
    """The hash of the model's n-grams. Raises CheckpointError if the tables' sizes are not the hash's."""
    engram = config.engram
    if engram is None:
        return None
    classes = load_classes(folder.path, engram, config.vocab_size)
    hashing = EngramHash(engram, int(classes[engram.pad_token]))
    if hashing.table_rows != engram.rows:
        raise refusal("engram_num_embeddings", f"{list(engram.rows)}, but the hash selects {list(hashing.table_rows)}")
    return EngramMemory(classes, hashing, engram.longest, config.image_token, ops)
