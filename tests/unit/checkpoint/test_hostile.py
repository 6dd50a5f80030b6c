"""Damaged, incomplete and mismatched checkpoints: each is refused with file, tensor and fix, before any use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import Folder
from engine.checkpoint.progress import Loaded
from engine.families import Family, open_family
from kernels import choose
from tests.support.tiny import TinySpec, fresh_pool, random_tokens, run_in_chunks, write_tiny

Edit = Callable[[dict[str, torch.Tensor]], None]


def opened(folder: Path) -> Family:
    return open_family(folder, torch.float32, False, choose("cpu"), block_tokens=16)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("whole"), TinySpec(upstream=True, quantized=True, mtp_layers=1))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "copy")


def edit(folder: Path, change: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def shard(folder: Path) -> dict[str, str]:
    """Split the file in two with an index; returns the index's map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return where


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    assert caught.value.fix
    return caught.value


def test_shards_load_as_the_single_file_does(whole: Path, folder: Path) -> None:
    shard(folder)
    logits = [
        run_in_chunks(family, fresh_pool(family), random_tokens(20, 1), 20)
        for family in (opened(whole), opened(folder))
    ]
    assert torch.equal(*logits)


def test_the_mtp_block_is_loaded_and_mapped(whole: Path) -> None:
    block = opened(whole).weights.mtp[0]  # type: ignore[attr-defined]
    assert block.hidden_norm.shape == (128,)
    assert block.layer.router.bias is not None


def test_progress_ends_at_the_whole_size(whole: Path) -> None:
    seen: list[Loaded] = []
    open_family(whole, torch.float32, False, choose("cpu"), progress=seen.append)
    assert seen[-1].bytes == seen[-1].all_bytes == sum(map(Folder(whole).num_bytes, Folder(whole).names))
    assert seen[-1].tensors == seen[-1].all_tensors == len(Folder(whole).names)
    assert [loaded.bytes for loaded in seen] == sorted(loaded.bytes for loaded in seen)


def remove(name: str) -> Edit:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = make(tensors[name])

    return change


def with_byte(tensor: torch.Tensor, value: int) -> torch.Tensor:
    raw = tensor.view(torch.uint8).clone()
    raw.view(-1)[0] = value
    return raw.view(tensor.dtype)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    spoiled = tensor.clone()
    spoiled.view(-1)[3] = torch.nan
    return spoiled


@pytest.mark.parametrize(
    ("change", "item", "message"),
    [
        (remove("layers.3.attn.wkv.weight"), "layers.3.attn.wkv.weight", "missing"),
        (remove("layers.3.attn.wkv.scale"), "layers.3.attn.wkv.scale", "missing"),
        (remove("layers.2.ffn.experts.5.w2.weight"), "layers.2.ffn.experts.5.w2.weight", "missing"),
        (remove("mtp.0.enorm.weight"), "mtp.0.enorm.weight", "missing"),
        (lambda t: t.update(stranger=torch.ones(1)), "stranger", "unknown tensor"),
        (put("head.weight", lambda t: t[:-1]), "head.weight", "shape"),
        (put("norm.weight", with_nan), "norm.weight", "NaN"),
        (put("layers.4.attn.wq_b.scale", lambda t: with_byte(t, 255)), "layers.4.attn.wq_b.scale", "NaN"),
        (put("layers.4.attn.wq_b.weight", lambda t: with_byte(t, 0x7F)), "layers.4.attn.wq_b.weight", "NaN"),
        (put("layers.0.ffn.experts.0.w1.scale", lambda t: with_byte(t, 255)), "layers.0.ffn.experts.0.w1.scale", "NaN"),
        (put("layers.0.attn.wq_a.scale", lambda t: t[:-1]), "layers.0.attn.wq_a.scale", "do not fit blocks"),
        (put("layers.0.ffn.gate.tid2eid", lambda t: t + 1), "layers.0.ffn.gate.tid2eid", "not in 0 .. 7"),
        (put("layers.0.ffn.gate.tid2eid", lambda t: t.float()), "layers.0.ffn.gate.tid2eid", "integers"),
        (
            put("layers.5.attn.attn_sink", lambda t: t.to(torch.int32)),
            "layers.5.attn.attn_sink",
            "numbers are expected",
        ),
        (put("norm.weight", lambda t: t.to(torch.float64)), "norm.weight", "type F64 is not supported"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(change: Edit, item: str, message: str, folder: Path) -> None:
    edit(folder, change)
    error = refused(folder)
    assert error.item == item
    assert message in error.message
    assert str(folder) in error.file


@pytest.mark.parametrize("keep", [0, 4, 300, -1000])
def test_a_truncated_file_is_refused(keep: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    error = refused(folder)
    assert error.file == str(path)
    assert "again" in error.fix


def test_a_scrambled_header_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[20:40] = b"\xff" * 20
    path.write_bytes(bytes(raw))
    assert "header" in refused(folder).message


@pytest.mark.parametrize("offsets", [[0, 10**12], [-8, 0], [8, 0], [0, 4]])
def test_a_header_that_points_elsewhere_is_refused(offsets: list[int], folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["norm.weight"]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    assert refused(folder).item == "norm.weight"


def test_a_missing_shard_is_refused_by_name(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    error = refused(folder)
    assert error.file.endswith("model-00002-of-00002.safetensors")
    assert "missing" in error.message


def test_an_index_that_names_an_absent_tensor_is_refused(folder: Path) -> None:
    where = shard(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": where | {"ghost": "model-00001-of-00002.safetensors"}})
    )
    assert refused(folder).item == "ghost"


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../../etc/passwd"}}'])
def test_a_broken_index_is_refused(content: str, folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    assert "index" in refused(folder).file


def test_a_folder_without_weights_or_config_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no .safetensors" in refused(folder).message
    (folder / "config.json").unlink()
    assert refused(folder).file.endswith("config.json")


def test_a_wrong_block_size_is_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"weight_block_size": [64, 64]})
    assert "do not fit blocks of [64, 64]" in refused(folder).message
    edit_config(folder, quantization_config={"weight_block_size": "64"})
    assert refused(folder).item == "quantization_config.weight_block_size"


def test_fp8_weights_without_a_quantization_config_are_refused(folder: Path) -> None:
    edit_config(folder, quantization_config=None)
    assert "no quantization_config" in refused(folder).message


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    edit_config(folder, hidden_size=256)
    assert "the config asks for" in refused(folder).message


def test_a_tensor_stored_under_both_names_is_refused(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["norm.weight"].clone()}))
    assert "stored twice" in refused(folder).message


def test_an_invariant_engine_refuses_kernels_that_are_not(whole: Path) -> None:
    with pytest.raises(CheckpointError, match="not batch invariant"):
        open_family(whole, torch.float32, True, choose("reference"))
