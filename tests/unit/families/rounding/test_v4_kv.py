"""V4's fake-quantized KV: what is cached is what its canonical records hold, bit for bit, and only where asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.pool import CachePool
from engine.checkpoint.errors import CheckpointError
from engine.families import Family
from engine.families.inventory import read_model
from engine.families.v4.config import parse
from engine.families.v4.options import Options, parse_options
from engine.families.v4.records import index_fp4, row_fp8
from engine.families.v4.tiny import TINY, UPSTREAM_KEYS
from engine.layout import GroupKind
from tests.support.roundings import mixed_by_hadamard, scaled_blocks
from tests.support.tiny import TinySpec, fresh_pool, random_tokens, run_in_chunks, tiny_family, write_tiny

WIDTHS = (("head_dim", 80),)  # 64 channels without position: one whole block
FIRST = {"csa": [4, 16, 4, 16, 0, 0, 4], "hca": [16, 4, 4, 16, 0, 0, 4]}  # which layer sees the embeddings alone
TOKENS = random_tokens(70, 31)
RECORDS = {"window": row_fp8(80, 16), "csa": row_fp8(80, 16), "hca": row_fp8(80, 16), "csa_index": index_fp4(32)}
Caches = dict[str, torch.Tensor]


def opened(folder: Path, first: str, switched: bool, dtype: torch.dtype = torch.float32) -> Family:
    spec = TinySpec(seed=8, upstream=True, overrides=(*WIDTHS, ("compress_ratios", FIRST[first])))
    write_tiny(folder, spec)
    if switched:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | {"serving": {"fake_quantize": True}}), encoding="utf-8")
    return tiny_family(folder, dtype=dtype)


def cached(family: Family, chunk: int) -> tuple[torch.Tensor, Caches]:
    """Logits of TOKENS, and all that is cached then: [layers, entries, width] by group."""
    pool = fresh_pool(family)
    logits = run_in_chunks(family, pool, TOKENS, chunk)
    return logits, {group: read(family, pool, group) for group in RECORDS}


def read(family: Family, pool: CachePool, name: str) -> torch.Tensor:
    group, dtype = family.layout.group(name), getattr(torch, family.layout.group(name).dtype)
    window = group.kind is GroupKind.WINDOW
    places = [0] if window else range(family.layout.blocks_for(len(TOKENS)))
    extents = [pool.slot_extent(name, p) if window else pool.block_extent(name, p) for p in places]
    rows = [torch.from_numpy(e).view(dtype).view(group.layers, group.entries, -1) for e in extents]
    count = group.entries if window else len(TOKENS) // group.tokens_per_entry
    return torch.cat(rows, 1)[:, :count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("first", FIRST)
def test_cached_values_are_those_of_packed_and_unpacked_records(first: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """In layer 0, whose inputs are the same with and without the switch."""
    plain = cached(opened(tmp_path / "plain", first, False, dtype), 16)[1]
    rounded = cached(opened(tmp_path / "rounded", first, True, dtype), 16)[1]
    for group in ("window", first):
        record = RECORDS[group]
        wanted = record.unpack(record.pack(plain[group][0].float()))
        assert torch.equal(rounded[group][0].float(), wanted)
        assert not torch.equal(wanted, plain[group][0].float())
    if first == "csa":
        wanted = scaled_blocks(mixed_by_hadamard(plain["csa_index"][0].float().numpy()), 32, "e2m1", power=True)
        assert torch.equal(rounded["csa_index"][0].double(), torch.from_numpy(wanted))


@pytest.mark.parametrize("first", FIRST)
def test_every_layer_holds_only_what_its_record_can(first: str, tmp_path: Path) -> None:
    for group, values in cached(opened(tmp_path, first, True), 7)[1].items():
        record = RECORDS[group]
        assert torch.equal(record.unpack(record.pack(values)), values), group


def test_chunks_change_no_bit(tmp_path: Path) -> None:
    family = opened(tmp_path, "csa", True)
    whole, held = cached(family, len(TOKENS))
    for chunk in (1, 3, 16):
        logits, again = cached(family, chunk)
        assert torch.equal(logits, whole)
        assert all(torch.equal(again[group], held[group]) for group in held)


def test_the_switch_shows_in_logits_and_in_the_layout(tmp_path: Path) -> None:
    plain, rounded = opened(tmp_path / "plain", "csa", False), opened(tmp_path / "rounded", "csa", True)
    difference = (cached(plain, 70)[0] - cached(rounded, 70)[0]).abs().max()
    assert difference > 1e-2
    assert plain.layout.fingerprint != rounded.layout.fingerprint
    assert plain.layout.group("csa").record_version == "v4.csa.float32.1"


def config(**changes: Any) -> dict[str, Any]:
    return {**TINY, **UPSTREAM_KEYS, **changes}


def test_off_unless_the_config_turns_it_on() -> None:
    for serving, wanted in (({}, False), ({"fake_quantize": False}, False), ({"fake_quantize": True}, True)):
        given = config(head_dim=80, serving=serving)
        assert parse_options(given, parse(given)) == Options(wanted)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"serving": []}, "serving"),
        ({"serving": {"fake_quantise": True}}, "serving"),
        ({"serving": {"fake_quantize": 1}}, "fake_quantize"),
        ({"serving": {"fake_quantize": True}}, "fake_quantize"),  # 48 channels are no whole block
        ({"serving": {"fake_quantize": True}, "head_dim": 80, "index_head_dim": 48}, "fake_quantize"),
        ({"serving": {"fake_quantize": True}, "head_dim": 80, "index_head_dim": 96}, "fake_quantize"),
    ],
)
def test_what_cannot_be_rounded_is_refused(changes: dict[str, Any], key: str) -> None:
    given = config(**changes)
    with pytest.raises(CheckpointError) as caught:
        parse_options(given, parse(given))
    assert (caught.value.file, caught.value.item) == ("config.json", key)
    assert caught.value.fix


def test_inspect_refuses_it_too() -> None:
    with pytest.raises(CheckpointError, match="48 channels"):
        read_model(config(serving={"fake_quantize": True}))
