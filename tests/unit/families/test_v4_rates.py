"""V4 at the published window and rates (128, 4 and 128), long enough that the indexer must choose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.families import Family, open_family
from kernels import choose
from tests.support.tiny import Piece, TinySpec, batch_of, fresh_pool, random_tokens, run_in_chunks, write_tiny

OVERRIDES = (
    ("sliding_window", 128),
    ("index_topk", 64),
    ("head_dim", 128),
    ("compress_rates", {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}),
)
TOKENS = random_tokens(600, 31)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("rates"), TinySpec(seed=11, overrides=OVERRIDES))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def family(request: pytest.FixtureRequest, folder: Path) -> Family:
    return open_family(folder, request.param, True, choose("cpu"))


def test_logits_equal_transformers_past_the_top_k(folder: Path) -> None:
    transformers_logging.disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    family = open_family(folder, torch.float32, True, choose("cpu"))
    assert family.layout.block_tokens == 128
    found = run_in_chunks(family, fresh_pool(family), TOKENS, 200)
    with torch.no_grad():
        wanted = reference(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert (found - wanted).abs().max() <= 1e-3


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_and_neighbours_change_no_bit(chunk: int, family: Family) -> None:
    whole = run_in_chunks(family, fresh_pool(family), TOKENS, len(TOKENS))
    pool, neighbour, logits = fresh_pool(family), random_tokens(700, 5), []
    for step, at in enumerate(range(0, len(TOKENS), chunk)):
        pieces = [Piece(TOKENS[at : at + chunk], at, range(8), 0)]
        if step < len(neighbour):  # beside it, another sequence decodes
            pieces.insert(0, Piece([neighbour[step]], step, range(10, 20), 1))
        rows = family.forward(batch_of(pieces), pool)
        logits.append(rows[len(rows) - len(pieces[-1].tokens) :])
    assert torch.equal(torch.cat(logits), whole)
