"""Engine configuration and model identity."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.model import model_revision
from tests.support.fakefamily import LAYOUT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_sequences", 0),
        ("max_batch_tokens", 16),
        ("max_batch_tokens", 1.5),
        ("num_blocks", -1),
        ("threads", 0),
        ("threads", True),
        ("memory_bytes", 0),
        ("dtype", "float16"),
        ("anchor_every_blocks", 0),
        ("max_waiting", None),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter) as refusal:
        EngineConfig(Path("model"), **{field: value})
    assert refusal.value.field == field and refusal.value.fix


def test_memory_is_divided_into_slots_and_blocks() -> None:
    config = EngineConfig(Path("model"), memory_bytes=10_000, max_sequences=4)
    blocks, slots = config.memory(LAYOUT)
    assert slots == 24 and blocks == (10_000 - 24 * LAYOUT.window_bytes) // LAYOUT.block_bytes
    assert EngineConfig(Path("model"), num_blocks=5, num_slots=3).memory(LAYOUT) == (5, 3)
    with pytest.raises(InvalidParameter, match="leaves no block"):
        EngineConfig(Path("model"), memory_bytes=100).memory(LAYOUT)


def test_the_revision_changes_with_any_byte_of_config_or_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(100_000))
    revision = model_revision(tmp_path)
    assert model_revision(tmp_path) == revision
    weights.write_bytes(bytes(70_000) + b"x" + bytes(29_999))
    changed = model_revision(tmp_path)
    (tmp_path / "config.json").write_text("{} ")
    assert len({revision, changed, model_revision(tmp_path)}) == 3


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "engram_token_map.json", "model.safetensors.index.json", "SHA256SUMS"]
)
def test_the_revision_changes_with_every_file_that_decides_what_tokens_mean(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    revisions = [model_revision(tmp_path)]
    for content in ("{}", "{} ", ""):
        (tmp_path / name).write_text(content)
        revisions.append(model_revision(tmp_path))
    assert len(set(revisions)) == 4


def test_the_revision_ignores_files_that_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    revision = model_revision(tmp_path)
    (tmp_path / "README.md").write_text("a model card")
    assert model_revision(tmp_path) == revision


def test_large_weights_are_sampled_from_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model._HASHED_WHOLE_BYTES", 1)
    monkeypatch.setattr("engine.model._SAMPLE_BYTES", 64)
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    revisions = set()
    for changed in (None, 0, 9_999):
        content = bytearray(10_000)
        if changed is not None:
            content[changed] = 1
        weights.write_bytes(content)
        revisions.add(model_revision(tmp_path))
    assert len(revisions) == 3


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"config\.json is missing"):
        model_revision(tmp_path)
