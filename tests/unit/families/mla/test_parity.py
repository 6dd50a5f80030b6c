"""V2, V3 and V3.2 equal transformers on tiny random checkpoints, however the tokens are cut and whatever is cached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.families import Family
from tests.support.tiny_mla import (
    FAMILIES,
    WIDE,
    Piece,
    TinySpec,
    batch_of,
    open_tiny,
    poisoned_pool,
    random_tokens,
    run_in_chunks,
    write_tiny,
)

BAR = 1e-3
LENGTHS = (1, 5, 15, 16, 17, 33, 70, 90)


@dataclass(frozen=True, slots=True)
class Pair:
    """A checkpoint as this engine and as transformers opened it."""

    folder: Path
    family: Family
    reference: torch.nn.Module

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """transformers' logits, without its cache."""
        with torch.no_grad():
            return self.reference(torch.tensor([tokens]), use_cache=False).logits[0]


def open_pair(folder: Path, spec: TinySpec) -> Pair:
    transformers_logging.disable_progress_bar()
    write_tiny(folder, spec)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Pair(folder, open_tiny(folder), reference)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return open_pair(tmp_path_factory.mktemp(request.param), TinySpec(request.param, seed=3))


@pytest.fixture(scope="module", params=FAMILIES)
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return open_pair(tmp_path_factory.mktemp(request.param), TinySpec(request.param, 4, WIDE))


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal_transformers_for_every_chunking(length: int, pair: Pair) -> None:
    tokens = random_tokens(length, length)
    wanted = pair.expected(tokens)
    assert wanted.std() > 1, "a degenerate checkpoint would prove nothing"
    for chunk in (length, 1, 3, 7, 16):
        found = run_in_chunks(pair.family, poisoned_pool(pair.family), tokens, chunk)
        assert (found - wanted).abs().max() <= BAR, f"chunks of {chunk}"


@pytest.mark.parametrize("chunk", [1, 40, 90])
def test_the_unabsorbed_form_equals_transformers_too(chunk: int, wide: Pair) -> None:
    """40 and 90 rows of the wide latent are cheaper un-absorbed (see test_forms), 1 row is not."""
    tokens = random_tokens(90, 5)
    found = run_in_chunks(wide.family, poisoned_pool(wide.family), tokens, chunk)
    assert (found - wide.expected(tokens)).abs().max() <= BAR


@pytest.mark.parametrize("length", [17, 70])
def test_the_reference_kernels_equal_transformers_too(length: int, pair: Pair) -> None:
    family, tokens = open_tiny(pair.folder, "reference"), random_tokens(length, length)
    for chunk in (length, 7):
        found = run_in_chunks(family, poisoned_pool(family), tokens, chunk)
        assert (found - pair.expected(tokens)).abs().max() <= BAR


def check_mixed_batch(pair: Pair) -> None:
    """A long chunk, a short extend and a decode step in one forward, in blocks out of order."""
    family, prompts, done = pair.family, [random_tokens(count, count) for count in (80, 50, 33)], (0, 45, 32)
    pool, blocks = poisoned_pool(family), (range(10, 20), range(30, 20, -1), range(10))
    cached = [Piece(p[:n], 0, b, 1) for p, n, b in zip(prompts, done, blocks, strict=True) if n]
    family.forward(batch_of(cached), pool)
    pieces = [Piece(p[n:], n, b, 1) for p, n, b in zip(prompts, done, blocks, strict=True)]
    parts = family.forward(batch_of(pieces), pool).split([len(piece.tokens) for piece in pieces])
    for tokens, start, part in zip(prompts, done, parts, strict=True):
        assert (part - pair.expected(tokens)[start:]).abs().max() <= BAR


def test_a_mixed_batch_equals_each_sequence_alone(pair: Pair) -> None:
    check_mixed_batch(pair)


def test_a_batch_that_mixes_both_forms_equals_each_sequence_alone(wide: Pair) -> None:
    check_mixed_batch(wide)


def test_greedy_generations_equal_transformers(pair: Pair) -> None:
    prompt = random_tokens(70, 8)
    generated = pair.reference.generate(
        torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=2
    )[0].tolist()
    pool, tokens = poisoned_pool(pair.family), list(prompt)
    logits = run_in_chunks(pair.family, pool, tokens, len(tokens))
    while len(tokens) < len(generated):
        tokens.append(int(logits[-1].argmax()))
        logits = run_in_chunks(pair.family, pool, tokens, 1, start=len(tokens) - 1)
    assert tokens == generated
    assert len(set(generated[70:])) > 8, "a generation that repeats itself would prove little"


def test_a_long_context_equals_transformers(pair: Pair) -> None:
    tokens = random_tokens(400, 9)
    found = run_in_chunks(pair.family, poisoned_pool(pair.family), tokens, 64)
    assert (found - pair.expected(tokens)).abs().max() <= BAR


def test_greedy_routing_and_a_single_shared_expert_equal_transformers(tmp_path: Path) -> None:
    changes = {"topk_method": "greedy", "n_group": None, "topk_group": None, "n_shared_experts": 1, "q_lora_rank": 48}
    lite, tokens = open_pair(tmp_path, TinySpec("v2", 6, changes)), random_tokens(33, 2)
    found = run_in_chunks(lite.family, poisoned_pool(lite.family), tokens, 16)
    assert (found - lite.expected(tokens)).abs().max() <= BAR
