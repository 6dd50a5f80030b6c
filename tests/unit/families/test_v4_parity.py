"""V4 equals transformers on tiny random checkpoints, however the tokens are cut and whatever is cached."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.families import Family
from tests.support.tiny import TinySpec, fresh_pool, random_tokens, run_in_chunks, tiny_family, write_tiny

BAR = 1e-3
LENGTHS = (1, 5, 15, 16, 17, 33, 70, 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), TinySpec(seed=3))


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def family(folder: Path) -> Family:
    return tiny_family(folder)


def expected(reference: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers_for_every_chunking(length: int, family: Family, reference: torch.nn.Module) -> None:
    tokens = random_tokens(length, length)
    wanted = expected(reference, tokens)
    assert wanted.std() > 1, "a degenerate checkpoint would prove nothing"
    for chunk in (length, 1, 3, 7, 16):
        found = run_in_chunks(family, fresh_pool(family), tokens, chunk)
        assert (found - wanted).abs().max() <= BAR, f"chunks of {chunk}"


@pytest.mark.parametrize("length", [17, pytest.param(70, marks=pytest.mark.slow)])
def test_the_reference_kernels_equal_transformers_too(length: int, folder: Path, reference: torch.nn.Module) -> None:
    family, tokens = tiny_family(folder, "reference"), random_tokens(length, length)
    for chunk in (length, 7):
        found = run_in_chunks(family, fresh_pool(family), tokens, chunk)
        assert (found - expected(reference, tokens)).abs().max() <= BAR


def test_a_long_context_equals_transformers(family: Family, reference: torch.nn.Module) -> None:
    tokens = random_tokens(400, 9)
    found = run_in_chunks(family, fresh_pool(family), tokens, 64)
    assert (found - expected(reference, tokens)).abs().max() <= BAR
