"""Folders that somebody forged: each is refused by file and tensor or key before a weight is read or memory taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.folder import INDEX
from engine.checkpoint.progress import Loaded
from engine.families import open_family, tiny
from engine.families.check import check_folder
from kernels import choose

FILE = "model.safetensors"
Header = dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("v3", tmp_path_factory.mktemp("written") / "v3", 1, True)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "model")


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        check_folder(folder)
    assert caught.value.fix
    return caught.value


def rewrite(folder: Path, header: bytes, data: bytes | None = None) -> None:
    raw = (folder / FILE).read_bytes()
    data = raw[8 + int.from_bytes(raw[:8], "little") :] if data is None else data
    (folder / FILE).write_bytes(len(header).to_bytes(8, "little") + header + data)


def header_of(folder: Path) -> Header:
    raw = (folder / FILE).read_bytes()
    found: Header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return found


def put(key: str, value: object) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        header["norm.weight" if "norm.weight" in header else "model.norm.weight"][key] = value

    return change


def claim(values: list[int]) -> Callable[[Header], None]:
    """A tensor of that shape without bytes."""
    return lambda header: header.update(claimed={"dtype": "F32", "shape": values, "data_offsets": [0, 0]})


@pytest.mark.parametrize(
    "change",
    [
        put("shape", [-16, -8]),
        put("shape", ["128"]),
        put("shape", [128.0]),
        put("shape", [True]),
        put("shape", 128),
        put("shape", None),
        put("data_offsets", [0.0, 256.0]),
        put("data_offsets", [0]),
        put("data_offsets", "ab"),
        put("dtype", 4),
        put("dtype", ["F32"]),
        put("dtype", "F4"),
        claim([1 << 60, 0]),
        claim([1 << 60]),
        lambda header: header.update(claimed=[1, 2, 3]),
        lambda header: header.update(claimed={"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}),
        lambda header: header.update(claimed={"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}),  # overlaps
    ],
)
def test_a_forged_entry_of_a_header_is_refused_by_file_and_tensor(
    change: Callable[[Header], None], folder: Path
) -> None:
    header = header_of(folder)
    change(header)
    rewrite(folder, json.dumps(header).encode())
    error = refused(folder)
    assert error.file.endswith(FILE)
    assert error.item


def test_bytes_that_belong_to_no_tensor_are_refused(folder: Path) -> None:
    with (folder / FILE).open("ab") as file:
        file.write(bytes(64))
    assert "64 bytes" in refused(folder).message


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1, 200_000_000])
def test_a_header_that_claims_a_huge_length_is_never_read(length: int, folder: Path) -> None:
    with (folder / FILE).open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(1 << 40)  # sparse: no disk is taken
    assert "header does not fit" in refused(folder).message


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b"[1, 2]",
        b"\xff\xfe{}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},'
        b' "a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
    ],
    ids=["objects in objects", "lists in lists", "a list", "not UTF-8", "a number of 5000 digits", "a name twice"],
)
def test_a_header_that_is_no_object_of_tensors_is_refused_by_file(header: bytes, folder: Path) -> None:
    rewrite(folder, header)
    assert refused(folder).file.endswith(FILE)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", INDEX])
@pytest.mark.parametrize("content", [b'{"a":' * 100_000, b"\xff\xfe", b"[]", b'{"a": 1, "a": 2}', b""])
def test_a_document_that_is_no_object_is_refused_by_file(content: bytes, file: str, folder: Path) -> None:
    (folder / file).write_bytes(content)
    assert refused(folder).file.endswith(file)


def test_a_document_of_a_terabyte_is_never_read(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert refused(folder).file.endswith("config.json")


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/../model.safetensors",
        "model.safetensors/",
        "config.json",
        "weights.bin",
        "x" * 300 + ".safetensors",
        "\0.safetensors",
        "\ud800.safetensors",
    ],
)
def test_an_index_can_name_no_file_but_a_shard_beside_it(name: str, folder: Path) -> None:
    where = dict.fromkeys(load_file(folder / FILE), FILE)
    (folder / INDEX).write_text(json.dumps({"weight_map": where | {"ghost": name}}))
    error = refused(folder)
    assert "leaves the folder" in error.message or "no safetensors" in error.message or "missing" in error.message
    assert INDEX in error.file or "safetensors" in error.file


def test_a_shard_that_is_a_link_to_another_kind_of_file_is_refused_as_a_shard(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(folder / "config.json")
    assert "header" in refused(folder).message


def test_shards_that_are_links_load_as_a_download_cache_has_them(folder: Path) -> None:
    (folder / FILE).rename(folder.parent / "blob")
    (folder / FILE).symlink_to(folder.parent / "blob")
    check_folder(folder)


def test_a_folder_in_the_place_of_a_shard_is_named(folder: Path) -> None:
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    error = refused(folder)
    assert error.file.endswith(FILE)
    assert "no file" in error.message


@pytest.mark.parametrize("listed", [False, True])
def test_a_tensor_in_two_shards_is_refused_with_both(listed: bool, folder: Path) -> None:
    tensors = load_file(folder / FILE)
    name = sorted(tensors)[0]
    save_file({name: tensors[name] + 1}, folder / "other.safetensors")
    if listed:
        where = dict.fromkeys(tensors, FILE) | {"other": "other.safetensors"}
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    error = refused(folder)
    assert error.item == name
    assert "other.safetensors" in error.file
    assert FILE in error.message


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Add tensors to the file; None takes one out."""
    kept = load_file(folder / FILE) | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, folder / FILE)


def test_a_tensor_under_both_conventions_names_is_refused_before_any_is_read(folder: Path) -> None:
    change(folder, **{"norm.weight": torch.ones(128)})
    error = refused(folder)
    assert error.item in ("norm.weight", "model.norm.weight")
    assert "stored twice" in error.message


def test_one_missing_expert_is_named_before_any_weight_is_read(folder: Path) -> None:
    change(folder, **{"model.layers.2.mlp.experts.3.up_proj.weight": None})
    error = refused(folder)
    assert "layers.2.mlp.experts.3.up_proj.weight" in error.item
    assert "missing" in error.message


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_a_draft_that_the_config_does_not_have_is_refused_by_name(family: str, tmp_path: Path) -> None:
    written = tiny.write(family, tmp_path / "model", 1)
    change(written, **{"mtp.7.enorm.weight": torch.ones(4)})
    error = refused(written)
    assert error.item == "mtp.7.enorm.weight"
    assert "num_nextn_predict_layers" in error.message


@pytest.mark.parametrize(
    ("change_to", "item", "message"),
    [
        ({"model.layers.3.input_layernorm.weight": None}, "layers.3.input_layernorm.weight", "missing"),
        ({"model.norm.weight": torch.ones(64)}, "model.norm.weight", "the config asks for"),
        ({"model.norm.weight": torch.ones(128, dtype=torch.int64)}, "model.norm.weight", "numbers are expected"),
        (
            {"model.layers.3.self_attn.o_proj.weight": torch.ones(128, 128)},
            "model.layers.3.self_attn.o_proj.weight",
            "has no scale",
        ),
        (
            {"model.norm.weight": torch.ones(128).to(torch.float8_e4m3fn)},
            "model.norm.weight",
            "needs a matrix and its scale",
        ),
    ],
    ids=["missing", "shape", "integers", "scale of a plain weight", "FP8 without scale"],
)
def test_what_the_last_layer_lacks_is_found_before_the_first_weight_is_read(
    change_to: dict[str, torch.Tensor | None], item: str, message: str, folder: Path
) -> None:
    seen: list[Loaded] = []
    change(folder, **change_to)
    with pytest.raises(CheckpointError) as refusal:
        open_family(folder, torch.float32, False, choose("reference"), progress=seen.append)
    assert refusal.value.item == item
    assert message in refusal.value.message
    assert refusal.value.fix
    assert not seen


def test_scales_of_a_type_that_is_none_are_refused(folder: Path) -> None:
    name = "model.layers.3.self_attn.o_proj.weight_scale_inv"
    scale = load_file(folder / FILE)[name]
    change(folder, **{name: scale.to(torch.float8_e4m3fn)})
    error = refused(folder)
    assert error.item == name
    assert "scales stored as F8_E4M3" in error.message
