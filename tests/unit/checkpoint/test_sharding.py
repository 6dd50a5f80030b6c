"""Loading by rank: all ranks together are the whole checkpoint, bit for bit, and what cannot be divided is refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.progress import Loaded
from engine.checkpoint.rank import Rank, Split, part_of, share, split_of
from engine.checkpoint.ranked import load_rank
from engine.checkpoint.sharding import Naming, part_bytes, parts
from engine.checkpoint.tensors import read
from engine.errors import InvalidParameter
from engine.families.mla import tiny as mla
from engine.families.v4 import tiny as v4
from engine.families.v41 import tiny as v41

# Wide enough that half of it is whole blocks of 48; its other sides end in ragged ones.
_V4_WIDE = (("num_attention_heads", 6), ("o_lora_rank", 48), ("moe_intermediate_size", 96))
WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "v2": ("mla", lambda path: mla.write_tiny(path, mla.TinySpec("v2"))),
    "v3": ("mla", lambda path: mla.write_tiny(path, mla.TinySpec("v3", changes={"num_nextn_predict_layers": 1}))),
    "v3-fp8-fp32-scales": ("mla", lambda path: mla.write_tiny(path, mla.TinySpec("v3", fp8_block=32))),
    "v32-fp8-ue8m0": (
        "mla",
        lambda path: mla.write_tiny(path, mla.TinySpec("v32", fp8_block=32, exponent_scales=True)),
    ),
    "v4-saved": ("v4", lambda path: v4.write_tiny(path, v4.TinySpec())),
    "v4-fp4-fp8": (
        "v4",
        lambda path: v4.write_tiny(path, v4.TinySpec(upstream=True, quantized=True, mtp_layers=1, overrides=_V4_WIDE)),
    ),
    "v41": ("v41", lambda path: v41.write_tiny(path, v41.TinySpec())),
    "v41-fp4-fp8": ("v41", lambda path: v41.write_tiny(path, v41.TinySpec(quantized=True))),
}


def naming(package: str) -> Naming:
    found: Naming = import_module(f"engine.families.{package}.names").NAMING
    return found


def written(name: str, path: Path) -> tuple[Folder, Naming]:
    package, write = WRITERS[name]
    write(path)
    return Folder(path), naming(package)


def joined(pieces: dict[tuple[int, int], torch.Tensor], split: Split) -> torch.Tensor:
    """One tensor from its ranks' parts, keyed by (expert rank, tensor rank)."""
    by_tensor_rank = [pieces[at] for at in sorted(pieces) if at[0] == min(pieces)[0]]
    if split in (Split.ROWS, Split.TABLE):
        return torch.cat(by_tensor_rank)
    return torch.cat(by_tensor_rank, 1) if split is Split.COLUMNS else by_tensor_rank[0]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (2, 1), (1, 3), (2, 4)])
def test_all_ranks_together_are_the_whole_bit_for_bit(name: str, tensor: int, expert: int, tmp_path: Path) -> None:
    folder, names = written(name, tmp_path)
    found: dict[str, dict[tuple[int, int], torch.Tensor]] = {stored: {} for stored in folder.names}
    for e in range(expert):
        for t in range(tensor):
            for stored, piece in load_rank(folder, names, Rank(e, expert, t, tensor)).items():
                found[stored][e, t] = piece
    for stored, pieces in found.items():
        split = split_of(names.upstream(stored), names.rules)
        assert split is not None
        whole = read(folder, stored)
        assert torch.equal(joined(pieces, split).view(torch.uint8), whole.view(torch.uint8)), stored
        holders = 1 if split is Split.EXPERT else expert
        assert len(pieces) == holders * tensor
        if split in (Split.WHOLE, Split.EXPERT):
            assert all(torch.equal(piece.view(torch.uint8), whole.view(torch.uint8)) for piece in pieces.values())


@pytest.mark.parametrize("name", WRITERS)
def test_a_rank_reads_its_share_of_the_bytes(name: str, tmp_path: Path) -> None:
    folder, names = written(name, tmp_path)
    seen: list[Loaded] = []
    loaded = load_rank(folder, names, Rank(0, 4, 1, 2), seen.append)
    held = sum(tensor.numel() * tensor.element_size() for tensor in loaded.values())
    assert seen[-1] == Loaded(len(loaded), len(loaded), held, held)
    mine = parts(folder, names, Rank(0, 4, 1, 2))
    assert held == sum(part_bytes(folder, stored, part) for stored, part in mine.items())
    experts = [stored for stored in folder.names if ".experts." in stored]
    assert sum(stored in loaded for stored in experts) == len(experts) // 4
    assert held < 0.7 * sum(map(folder.num_bytes, folder.names))


def test_every_tensor_of_a_family_has_a_rule(tmp_path: Path) -> None:
    for name in WRITERS:
        folder, names = written(name, tmp_path / name)
        missing = [stored for stored in folder.names if split_of(names.upstream(stored), names.rules) is None]
        assert missing == [], name


def test_a_split_through_a_block_is_refused_with_the_ranks_that_work(tmp_path: Path) -> None:
    v4.write_tiny(tmp_path, v4.TinySpec(upstream=True, quantized=True))
    with pytest.raises(CheckpointError, match="blocks of 48 do not divide among 2 tensor ranks") as refused:
        load_rank(Folder(tmp_path), naming("v4"), Rank(tensor_ranks=2))
    assert refused.value.item.endswith(".weight")
    assert refused.value.file.endswith("model.safetensors")
    assert "one tensor rank" in refused.value.fix
    folder, names = written("v3-fp8-fp32-scales", tmp_path / "v3")
    with pytest.raises(CheckpointError, match="blocks of 32 do not divide among 4 tensor ranks") as refused:
        load_rank(folder, names, Rank(tensor_ranks=4))
    assert "use 2 tensor ranks" in refused.value.fix


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    folder, names = written("v2", tmp_path)
    with pytest.raises(CheckpointError, match="do not divide among 3 tensor ranks"):
        load_rank(folder, names, Rank(tensor_ranks=3))


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Folder:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    return Folder(path)


@pytest.mark.parametrize(
    ("edit", "item", "message"),
    [
        (lambda t: t.update({"layers.0.attn.rotary": torch.ones(1)}), "layers.0.attn.rotary", "unknown tensor"),
        (
            lambda t: t.update({"layers.0.ffn.experts.8.w1.weight": torch.ones(1, 1)}),
            "layers.0.ffn.experts.8.w1.weight",
            "unknown tensor",
        ),
        (lambda t: t.pop("layers.1.attn.wo_b.weight"), "layers.1.attn.wo_b.weight", "missing"),
        (
            lambda t: t.update({"layers.1.attn.wo_b.scale": t["layers.1.attn.wo_b.scale"][:-1].clone()}),
            "layers.1.attn.wo_b.scale",
            "do not fit blocks of [48, 48]",
        ),
        (
            lambda t: t.update({"layers.1.ffn.experts.0.w1.scale": torch.ones(96, 4)}),
            "layers.1.ffn.experts.0.w1.scale",
            "FP4 needs E8M0 scales",
        ),
    ],
)
def test_what_does_not_belong_is_refused_before_anything_is_read(
    edit: Callable[[dict[str, torch.Tensor]], None], item: str, message: str, tmp_path: Path
) -> None:
    written("v4-fp4-fp8", tmp_path)
    seen: list[Loaded] = []
    with pytest.raises(CheckpointError) as refused:
        load_rank(change(tmp_path, edit), naming("v4"), Rank(), seen.append)
    assert (refused.value.item, seen) == (item, [])
    assert message in refused.value.message


@pytest.mark.parametrize("rank", [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 1, 1, 1), (0, 0, 0, 1)])
def test_a_rank_that_cannot_be_is_refused(rank: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidParameter, match="rank"):
        Rank(*rank)


@pytest.mark.parametrize(("count", "ranks"), [(8, 3), (256, 16), (5, 8)])
def test_shares_follow_one_another_and_differ_by_one_at_most(count: int, ranks: int) -> None:
    runs = [share(count, rank, ranks) for rank in range(ranks)]
    assert [item for run in runs for item in run] == list(range(count))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_a_table_of_rows_divides_unevenly_as_its_published_sizes_are_no_multiples() -> None:
    """V4.1-Flash's second Engram table."""
    rows = [
        part_of("layers.14.engram.embed.weight", Split.TABLE, (384_016_682, 256), (1, 32), Rank(0, 1, rank, 8)).rows
        for rank in range(8)
    ]
    assert (rows[0].start, rows[-1].stop) == (0, 384_016_682)
    assert all(before.stop == after.start for before, after in pairwise(rows))
