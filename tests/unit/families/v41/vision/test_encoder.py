"""Pixels to embeddings equal the reference step by step; checkpoints without a whole tower are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.errors import CheckpointError
from engine.families.v41.tiny import TinySpec, write_tiny
from engine.families.v41.vision.encoder import content_hash, encode, load_encoder
from engine.families.v41.vision.patches import patches
from engine.families.v41.vision.picture import Bounds, decode
from engine.families.v41.vision.sizing import Plan, plan
from engine.families.v41.vision.span import roles, span
from engine.families.v41.vision.tower import align, tower
from tests.unit.families.v41.vision.material import CHECKPOINT, COUNT, Tensors, encoder, image_bytes, listed, reference

BAR = 1e-4
every_image = pytest.mark.parametrize("index", range(COUNT))


def planned(index: int) -> Plan:
    about = listed()[index]
    return plan(about["width"], about["height"], encoder().config.limits)


@every_image
def test_sizes_and_grids_equal_the_reference(index: int) -> None:
    found, about = planned(index), listed()[index]
    assert (found.height, found.width) == (about["pixel_height"], about["pixel_width"])
    assert [found.patch_rows, found.patch_columns] == about["vit_grid"]
    assert ([found.rows, found.columns], found.tokens) == (about["token_grid"], about["tokens"])


@every_image
def test_patches_equal_the_reference_in_every_bit(index: int) -> None:
    found = patches(decode(image_bytes(index), Bounds()), planned(index), encoder().config.limits)
    wanted = reference()[f"patches_{index}"]
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(found, wanted)


@every_image
def test_tower_and_aligner_equal_the_reference(index: int) -> None:
    config, weights, at = encoder().config, encoder().weights, planned(index)
    states = tower(reference()[f"patches_{index}"], at, config, weights)
    assert (states - reference()[f"vit_{index}"]).abs().max() <= BAR
    found = align(reference()[f"vit_{index}"], at, config, weights)
    assert (found - reference()[f"aligner_{index}"]).abs().max() <= BAR


@every_image
def test_roles_and_span_equal_the_reference_exactly(index: int) -> None:
    found = span(reference()[f"aligner_{index}"], planned(index), encoder().weights.markers)
    assert np.array_equal(roles(planned(index)), reference()[f"roles_{index}"].numpy())
    assert torch.equal(found, reference()[f"span_{index}"])


@every_image
def test_a_file_becomes_the_reference_span(index: int) -> None:
    found = encode(image_bytes(index), encoder())
    wanted = reference()[f"span_{index}"].numpy()
    assert wanted.std() > 0.1, "a degenerate tower would prove nothing"
    assert found.rows.dtype == np.float32
    assert np.abs(found.rows - wanted).max() <= BAR
    assert found.plan.tokens == len(found.rows)


def test_the_same_file_gives_the_same_bits_and_digest_and_another_others() -> None:
    first, again, other = (encode(image_bytes(index), encoder()) for index in (0, 0, 5))
    assert np.array_equal(first.rows, again.rows)
    assert first.digest == again.digest != other.digest
    assert len(first.digest) == 32


def test_the_digest_changes_with_the_encoder() -> None:
    digests = {content_hash(data, revision) for data in (b"a", b"b", b"") for revision in ("1", "2", "")}
    assert len(digests) == 9


def test_matrices_in_bf16_stay_near() -> None:
    """What a deployment may choose; its digest is the checkpoint's all the same."""
    found = encode(image_bytes(1), load_encoder(CHECKPOINT, torch.bfloat16)).rows
    wanted = reference()["span_1"].numpy()
    assert BAR < np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(CHECKPOINT / name, tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("image_newline", None, "missing"),
        ("vision.blocks.1.attn.wqkv.bias", None, "missing"),
        ("vision.blocks.3.attn.wqkv.bias", torch.zeros(192), "unknown"),
        ("aligner.w1.weight", torch.zeros(128, 64), "config asks for"),
        ("vision.norm.weight", torch.full((64,), torch.nan), "NaN"),
    ],
)
def test_a_wrong_tensor_is_refused_by_its_name(
    name: str, value: torch.Tensor | None, message: str, copied: Path
) -> None:
    rewrite(copied, lambda weights: weights.pop(name) if value is None else weights.__setitem__(name, value))
    with pytest.raises(CheckpointError) as caught:
        load_encoder(copied)
    assert caught.value.item == name
    assert message in str(caught.value)


def test_a_model_without_vision_is_refused_with_the_missing_section(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    del config["vision_config"]
    (copied / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        load_encoder(copied)
    assert caught.value.item == "vision_config"


def test_a_written_tiny_checkpoint_sees_and_its_seed_decides_how(tmp_path: Path) -> None:
    rows = []
    for name, spec in (("first", TinySpec(1)), ("again", TinySpec(1, quantized=True)), ("other", TinySpec(2))):
        rows.append(encode(image_bytes(1), load_encoder(write_tiny(tmp_path / name, spec))).rows)
    assert rows[0].std() > 0.1
    assert np.array_equal(rows[0], rows[1]), "vision is never quantized"
    assert np.abs(rows[0] - rows[2]).max() > 0.1
    with pytest.raises(CheckpointError, match="vision_config"):
        load_encoder(write_tiny(tmp_path / "blind", TinySpec(1, sees=False)))
