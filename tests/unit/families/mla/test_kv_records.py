"""V2, V3 and V3.2 over caches of published records: layouts, what is refused, and what is handed on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.families.inventory import read_model
from engine.families.mla.records import latent_fp8
from engine.families.mla.tiny import TinySpec, write_tiny
from engine.requests import PrefillRequest
from tests.support.driving import GREEDY, handoff, run, tokens_of, whole

WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
INDEX = {"index_head_dim": 128, "index_topk": 16}
PROMPT = tuple(3 + (11 * place) % 431 for place in range(40))


def written(family: str, folder: Path, **changes: object) -> Path:
    given = {**WIDE, **(INDEX if family == "v32" else {}), **changes}
    return write_tiny(folder / "model", TinySpec(family, changes=given))


def opened(folder: Path, kv_cache: str = "records", batch_tokens: int = 64) -> Engine:
    config = EngineConfig(
        folder, num_blocks=8, block_tokens=16, kernels="reference", max_sequences=2, max_batch_tokens=batch_tokens,
        kv_cache=kv_cache,
    )  # fmt: skip
    return Engine.open(config)


def test_groups_have_the_published_sizes(tmp_path: Path) -> None:
    groups = opened(written("v32", tmp_path)).model.layout.groups
    assert [(group.name, group.record_bytes) for group in groups] == [
        ("latent", 656), ("index_key", 128), ("index_scale", 4)
    ]  # fmt: skip


def test_a_block_holds_the_contracts_records_of_what_rows_would_hold(tmp_path: Path) -> None:
    folder = written("v3", tmp_path)
    records, rows = opened(folder), opened(folder, "rows")
    for engine in (records, rows):
        engine.submit_prefill(PrefillRequest("r", PROMPT, GREEDY, cache=False))
        run(engine)
    blocks = [engine.held("r").block_table[0] for engine in (records, rows)]
    held = torch.from_numpy(records.pool.block_extent("latent", blocks[0]).copy()).view(2, 16, 656)[0]
    values = torch.from_numpy(rows.pool.block_extent("latent", blocks[1]).copy()).view(torch.float32)
    expected = latent_fp8(512, 64).pack(values.view(2, 16, 576)[0])
    assert (held == expected).float().mean() > 0.99


@pytest.mark.parametrize("family", ["v2", "v3", "v32"])
def test_chunks_cache_the_same_records(family: str, tmp_path: Path) -> None:
    """But for numbers between two codes, which sums in another order may take to either."""
    folder, extents = written(family, tmp_path), []
    for batch_tokens in (64, 7):
        engine = opened(folder, batch_tokens=batch_tokens)
        engine.submit_prefill(PrefillRequest("r", PROMPT, GREEDY, cache=False))
        run(engine)
        extents.append(engine.pool.host_blocks[list(engine.held("r").block_table)])
    assert (extents[0] == extents[1]).mean() > 0.98


@pytest.mark.parametrize("family", ["v2", "v3", "v32"])
def test_a_handoff_changes_no_token(family: str, tmp_path: Path) -> None:
    folder = written(family, tmp_path)
    expected = whole(opened(folder), PROMPT, cache=False)
    source, target = opened(folder), opened(folder)
    first, _ = handoff(source, target, PrefillRequest("r", PROMPT, GREEDY, cache=False))
    assert [first.token, *tokens_of(run(target), "r")] == expected


def test_engines_with_other_caches_exchange_nothing(tmp_path: Path) -> None:
    folder = written("v32", tmp_path)
    rows, records = opened(folder, "rows").model.layout, opened(folder).model.layout
    assert rows.records_fingerprint != records.records_fingerprint


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim"),
        ({"index_head_dim": 64}, "index_head_dim"),
        ({"index_n_heads": 8}, "index_n_heads"),
        ({"index_topk": 4096}, "index_topk"),
    ],
)
def test_widths_that_no_record_has_are_refused(changes: dict[str, int], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{named}.*published records are of .*choose kv_cache=rows"):
        opened(written("v32", tmp_path, **changes))


@pytest.mark.parametrize("family", ["v3", "v32"])
def test_what_is_counted_before_a_start_is_what_a_start_caches(family: str, tmp_path: Path) -> None:
    folder = written(family, tmp_path)
    assert read_model(Folder(folder).config).facts.record_layout(16) == opened(folder).model.layout


def test_an_unknown_cache_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="kv_cache"):
        EngineConfig(Path(), kv_cache="fp8")
