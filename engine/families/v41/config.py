"""V4.1's text configuration, checked field by field. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.families.fields import MOST_EXPERTS, MOST_LAYERS, MOST_TIMES, Fields, is_integer, refusal, rope_of
from engine.families.v4.config import MECHANISMS
from engine.families.v41.schedule import Schedule, parse_schedule
from engine.families.yarn import Rope

# Of the section `serving`; their meaning is in `options`.
SWITCHES = ("fake_quantize", "encoder_replay", "decoder_replay", "handoff_replay")
_MOST_HASHES = 64  # the published model has 8 of up to 3 tokens; each is a search for a prime
_MOST_ROWS = 1 << 40


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """The hashed n-gram memory: in which layers, how large, and how tokens become table rows."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]  # of each layer's table
    first_prime_after: int
    longest: int  # tokens of the longest n-gram
    heads: int  # hashes per n-gram length
    width: int  # of one table row
    classes: int  # of the normalised vocabulary
    pad_token: int

    @property
    def columns(self) -> int:
        """Table rows read per token and layer."""
        return (self.longest - 1) * self.heads


@dataclass(frozen=True, slots=True)
class V41Config:
    """Everything the text forward needs to know, under this project's names."""

    vocab_size: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_blocks: int
    candidate_block_entries: int
    experts: int
    experts_per_token: int
    expert_inner: int
    routed_scaling: float
    swiglu_limit: float
    gate_temperature: float
    streams: int
    sinkhorn_iterations: int
    hyper_eps: float
    norm_eps: float
    schedule: Schedule
    engram: EngramConfig | None
    main_rope: Rope
    compress_rope: Rope
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    image_token: int | None  # positions with this id are routed as images and are dead to Engram
    draft_layers: int

    @property
    def layers(self) -> int:
        """Text layers, drafts not counted."""
        return len(self.schedule.roles)


def parse(config: dict[str, Any]) -> V41Config:
    """Raises CheckpointError naming the key for anything missing, of the wrong kind, or not V4.1."""
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise refusal("text_config", f"{text!r} is not a section")
    fields = Fields(text)
    fields.expect(MECHANISMS)
    layers = fields.count("num_hidden_layers", MOST_LAYERS)
    drafts = fields.whole("num_nextn_predict_layers", 0, below=MOST_LAYERS)
    schedule = parse_schedule(fields, layers, drafts)
    parsed = V41Config(
        **_widths(fields),
        **_numbers(fields),
        **_choice(fields, schedule),
        schedule=schedule,
        engram=_engram(fields, layers),
        main_rope=Rope(fields.base("rope_theta"), None),
        compress_rope=_compress_rope(fields),
        eos_token_ids=Fields({**config, **text}).tokens("eos_token_id", 1),
        image_token=_image_token(config, fields.count("vocab_size")),
        draft_layers=drafts,
    )
    _check(parsed)
    return parsed


def _widths(fields: Fields) -> dict[str, int]:
    keys = {
        "vocab_size": "vocab_size", "hidden": "hidden_size", "heads": "num_attention_heads", "head_dim": "head_dim",
        "rope_dim": "qk_rope_head_dim", "query_rank": "q_lora_rank", "output_groups": "o_groups",
        "output_rank": "o_lora_rank", "window": "sliding_window", "experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok", "expert_inner": "moe_intermediate_size", "streams": "hc_mult",
        "sinkhorn_iterations": "hc_sinkhorn_iters", "max_context_tokens": "max_position_embeddings",
    }  # fmt: skip
    most = {"n_routed_experts": MOST_EXPERTS, "hc_mult": MOST_TIMES, "hc_sinkhorn_iters": MOST_TIMES}
    return {name: fields.count(key, *([most[key]] if key in most else [])) for name, key in keys.items()}


def _numbers(fields: Fields) -> dict[str, float]:
    return {
        "routed_scaling": fields.number("routed_scaling_factor"),
        "swiglu_limit": fields.number("swiglu_limit"),
        "gate_temperature": fields.number("gate_temp", 1.0),  # absent from the published config; its code says 1
        "hyper_eps": fields.number("hc_eps"),
        "norm_eps": fields.number("rms_norm_eps"),
    }


def _choice(fields: Fields, schedule: Schedule) -> dict[str, int]:
    """Sizes of the indexer and of the candidate set; 1 where the schedule has none."""
    keys = {"index_heads": "index_n_heads", "index_dim": "index_head_dim", "index_topk": "index_topk"}
    blocks = {"candidate_blocks": "candidate_topk_blocks", "candidate_block_entries": "candidate_block_size"}
    read = {name: fields.count(key) if schedule.ratios else 1 for name, key in keys.items()}
    proposes = any(role.proposes for role in schedule.roles)
    return {**read, **{name: fields.count(key) if proposes else 1 for name, key in blocks.items()}}


def _engram(fields: Fields, layers: int) -> EngramConfig | None:
    placed = fields.ascending("engram_layer_ids", layers)
    if not placed:
        return None
    rows = fields.values.get("engram_num_embeddings")
    sizes = rows if isinstance(rows, list) else []
    if len(sizes) != len(placed) or not all(is_integer(size) and 0 < size <= _MOST_ROWS for size in sizes):
        raise refusal("engram_num_embeddings", f"{rows!r} does not give a size to each of layers {placed}")
    if fields.count("engram_max_ngram_size") < 2:
        raise refusal("engram_max_ngram_size", "an n-gram has at least two tokens")
    pad = "engram_pad_token_id" if "engram_pad_token_id" in fields.values else "engram_pad_id"
    return EngramConfig(
        layers=placed,
        rows=tuple(sizes),
        first_prime_after=fields.count("engram_vocab_size") - 1,
        longest=fields.count("engram_max_ngram_size", _MOST_HASHES),
        heads=fields.count("engram_n_heads", _MOST_HASHES),
        width=fields.count("engram_head_dim"),
        classes=fields.count("engram_compressed_vocab_size"),
        pad_token=fields.whole(pad, -1, below=fields.count("vocab_size")),
    )


def _compress_rope(fields: Fields) -> Rope:
    """Only the table of compressed entries is scaled."""
    return rope_of(fields.base("compress_rope_theta"), fields.section("rope_scaling"), "rope_scaling")


def _image_token(config: dict[str, Any], vocab_size: int) -> int | None:
    given = config.get("image_token_id")
    return None if given is None else Fields(config).whole("image_token_id", -1, below=vocab_size)


def _check(config: V41Config) -> None:
    """Relations between fields."""
    if config.heads % config.output_groups:
        raise refusal("o_groups", f"{config.output_groups} does not divide {config.heads} heads")
    if config.rope_dim % 2 or config.rope_dim > config.head_dim:
        raise refusal("qk_rope_head_dim", f"{config.rope_dim} does not fit head_dim {config.head_dim}")
    if config.schedule.ratios and config.index_dim < config.rope_dim:
        raise refusal("index_head_dim", f"narrower than the rotary part ({config.rope_dim})")
    if config.experts_per_token > config.experts:
        raise refusal("num_experts_per_tok", f"more than the {config.experts} experts")
