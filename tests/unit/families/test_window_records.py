"""V4 and V4.1 over caches of published records: layouts, values, what is refused, and what is handed on and stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cache.pool import CachePool
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.events import FirstToken
from engine.families import open_family
from engine.families.inventory import read_model
from engine.families.v4.records import row_fp8
from engine.families.v41.records import window_record
from engine.openable import check_openable
from engine.requests import GenerateRequest, Load, PrefillRequest
from kernels import choose
from tests.support.driving import GREEDY, handoff, of, run, tokens_of, whole
from tests.support.tiny import Piece, batch_of
from tests.support.wide import write_wide

FAMILIES = ("v4", "v41")
PROMPT = tuple(3 + (11 * place) % 431 for place in range(40))
ALL = {"index_topk": 128}  # every visible entry is chosen


def opened(folder: Path, kv_cache: str = "records", batch_tokens: int = 64, window_state: str = "auto") -> Engine:
    config = EngineConfig(
        folder, num_blocks=8, block_tokens=16, kernels="reference", max_sequences=2, max_batch_tokens=batch_tokens,
        kv_cache=kv_cache, window_state=window_state, anchor_every_blocks=1,
    )  # fmt: skip
    return Engine.open(config)


def test_groups_have_the_published_sizes(tmp_path: Path) -> None:
    sizes = {}
    for family in FAMILIES:
        groups = opened(write_wide(family, tmp_path / family)).model.layout.groups
        sizes[family] = {group.name: group.record_bytes for group in groups}
    codes = {"csa": 576, "csa_scale": 8, "hca": 576, "hca_scale": 8, "csa_index": 128, "csa_index_scale": 4}
    assert sizes["v4"].items() >= (codes | {"window": 576, "window_scale": 8}).items()
    assert sizes["v41"].items() >= {"entries_1": 288, "entries_2": 288, "index_1": 68, "window": 528}.items()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slot_holds_the_contracts_records_of_what_rows_would_hold(family: str, tmp_path: Path) -> None:
    """Of the first layer, whose rows depend on no cache."""
    folder, held = write_wide(family, tmp_path / "model"), {}
    for kv_cache in ("records", "rows"):
        engine = opened(folder, kv_cache)
        engine.submit_prefill(PrefillRequest("r", PROMPT, GREEDY, cache=False))
        run(engine)
        for group in engine.model.layout.windows:
            extent = engine.pool.slot_extent(group.name, engine.held("r").slot).copy()
            first = torch.from_numpy(extent)[: group.entries * group.record_bytes].view(group.entries, -1)
            held[kv_cache, group.name] = first[
                [place % group.entries for place in range(len(PROMPT) - 16, len(PROMPT))]
            ]
    record = row_fp8(512, 64) if family == "v4" else window_record(512)
    found = [held["records", name] for name in ("window", "window_scale") if ("records", name) in held]
    expected = record.pack(held["rows", "window"].contiguous().view(torch.float32))
    assert (torch.cat(found, 1) == expected).float().mean() > 0.99


@pytest.mark.parametrize(("family", "changes"), [("v4", ALL), ("v41", {})])
def test_tokens_are_those_of_rows_that_are_quantized_and_dequantized(
    family: str, changes: dict[str, int], tmp_path: Path
) -> None:
    """V4 where all is chosen: its rows hold index keys in four bits, its records in eight."""
    records = whole(opened(write_wide(family, tmp_path / "records", **changes)), PROMPT, cache=False)
    rounded = write_wide(family, tmp_path / "rows", "fake_quantize", **changes)
    assert records == whole(opened(rounded, "rows"), PROMPT, cache=False)


def test_a_draft_over_records_answers_as_over_rows_that_are_rounded(tmp_path: Path) -> None:
    """V4's MTP block, in chunks of which the last brings fewer rows than its ring has room for."""
    guesses = []
    for kv_cache, switches in (("records", ()), ("rows", ("fake_quantize",))):
        folder = write_wide("v4", tmp_path / kv_cache, *switches, mtp_layers=1, **ALL)
        ops = choose("reference", records=kv_cache == "records")
        family = open_family(folder, torch.float32, False, ops, block_tokens=16)
        assert family.draft is not None
        model, draft = (CachePool(layout, 4, 2, torch.float32) for layout in (family.layout, family.draft.layout))
        for first, end in ((0, 30), (30, 34)):
            batch, behind = (
                batch_of([Piece(PROMPT[first + ahead : end + ahead], first, range(4), 0)]) for ahead in (0, 1)
            )
            guess = family.draft.forward(behind, family.draft.follow(batch, model).hidden, draft)
        guesses.append(guess.logits)
    assert (guesses[0] - guesses[1]).abs().max() < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_cache_the_same_records(family: str, tmp_path: Path) -> None:
    """But for numbers between two codes, which sums in another order may take to either. Chunks of seven are stored
    before they are attended, the whole prompt after."""
    folder, extents = write_wide(family, tmp_path / "model", **ALL), []
    for batch_tokens in (64, 7):
        engine = opened(folder, batch_tokens=batch_tokens)
        engine.submit_prefill(PrefillRequest("r", PROMPT, GREEDY, cache=False))
        run(engine)
        extents.append(engine.pool.host_blocks[list(engine.held("r").block_table)])
    assert (extents[0] == extents[1]).mean() > 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_a_handoff_changes_no_token(family: str, tmp_path: Path) -> None:
    folder = write_wide(family, tmp_path / "model")
    expected = whole(opened(folder), PROMPT, cache=False)
    source, target = opened(folder), opened(folder)
    first, _ = handoff(source, target, PrefillRequest("r", PROMPT, GREEDY, cache=False))
    assert [first.token, *tokens_of(run(target), "r")] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_from_a_store_is_as_good_as_ones_own(family: str, tmp_path: Path) -> None:
    """Token by token; a run from nothing cuts the prompt elsewhere, and a number between two codes may then fall to
    either."""
    folder = write_wide(family, tmp_path / "model")
    source, engine = (opened(folder, window_state="exact") for _ in range(2))
    source.submit_prefill(PrefillRequest("r", PROMPT, GREEDY))
    run(source)
    sealed = source.sealed("r")
    assert sealed.anchor is not None
    count = sealed.anchor.tokens // source.model.layout.block_tokens
    load = engine.begin_load(PROMPT, b"", 0, count)
    copy_sealed(source, engine, load, sealed.anchor.slot)
    assert engine.finish_load(load, count).hit_tokens == sealed.anchor.tokens
    source.release("r")
    tokens = []
    for one in (source, engine):
        one.submit(GenerateRequest("again", PROMPT, GREEDY))
        events = run(one)
        assert of(events, FirstToken)[0].cached_tokens == sealed.anchor.tokens
        tokens.append(tokens_of(events, "again"))
    assert tokens[0] == tokens[1]


def copy_sealed(source: Engine, target: Engine, load: Load, anchor: int) -> None:
    """The bytes of sealed blocks and of their anchor, as a store would give them back."""
    for group in source.model.layout.globals:
        for block, sealed in zip(load.blocks, source.sealed("r").blocks, strict=False):
            target.pool.block_extent(group.name, block)[:] = source.pool.block_extent(group.name, sealed.block)
    for group in source.model.layout.windows:
        target.pool.slot_extent(group.name, load.slot)[:] = source.pool.slot_extent(group.name, anchor)


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_with_other_caches_exchange_nothing(family: str, tmp_path: Path) -> None:
    folder = write_wide(family, tmp_path / "model")
    rows, records = opened(folder, "rows").model.layout, opened(folder).model.layout
    assert rows.records_fingerprint != records.records_fingerprint
    assert rows.fingerprint != records.fingerprint


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("v4", {"head_dim": 256}, "head_dim"),
        ("v4", {"qk_rope_head_dim": 32}, "qk_rope_head_dim"),
        ("v4", {"index_head_dim": 64}, "index_head_dim"),
        ("v4", {"index_n_heads": 8}, "index_n_heads"),
        ("v4", {"index_topk": 4096}, "index_topk"),
        ("v41", {"head_dim": 256}, "head_dim"),
        ("v41", {"index_head_dim": 64}, "index_head_dim"),
    ],
)
def test_widths_that_no_record_has_are_refused(
    family: str, changes: dict[str, int], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"{named}.*published records are of .*choose kv_cache=rows"):
        opened(write_wide(family, tmp_path / "model", **changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_counted_before_a_start_is_what_a_start_caches(family: str, tmp_path: Path) -> None:
    folder = write_wide(family, tmp_path / "model")
    facts = read_model(Folder(folder).config).facts
    assert facts.record_layout(16) == opened(folder).model.layout
    given = EngineConfig(folder, kv_cache="records", kernels="reference")
    check_openable(given)
    with pytest.raises(InvalidParameter, match="memory_bytes"):
        check_openable(replace(given, memory_bytes=1000))


def test_a_check_refuses_widths_that_no_record_has(tmp_path: Path) -> None:
    folder = write_wide("v4", tmp_path / "model", index_head_dim=64)
    check_openable(EngineConfig(folder, kernels="reference"))
    with pytest.raises(CheckpointError, match="index_head_dim"):
        check_openable(EngineConfig(folder, kv_cache="records", kernels="reference"))


def test_without_compressed_layers_no_index_is_asked_for(tmp_path: Path) -> None:
    folder = write_wide("v4", tmp_path / "model", num_hidden_layers=2, compress_ratios=[0, 16], index_head_dim=64)
    assert [group.name for group in opened(folder).model.layout.globals] == ["hca", "hca_scale"]
