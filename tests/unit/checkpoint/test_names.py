"""Both saved forms of one model are one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.families.v4.names import upstream
from tests.support.tiny import TinySpec, fresh_pool, random_tokens, run_in_chunks, tiny_family, write_tiny


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("head.weight", "head.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.hc_head.hc_fn", "hc_head_fn"),
        ("model.layers.3.attn.norm.weight", "layers.3.attn.kv_norm.weight"),
        ("model.layers.3.attn.compressor.norm.weight", "layers.3.attn.compressor.norm.weight"),
        ("mtp.0.norm.weight", "mtp.0.norm.weight"),
    ],
)
def test_a_stored_name_becomes_the_upstream_one(stored: str, name: str) -> None:
    assert upstream(stored) == name


def test_both_names_and_both_key_sets_give_the_same_logits(tmp_path: Path) -> None:
    tokens, logits = random_tokens(50, 2), []
    for is_upstream in (False, True):
        family = tiny_family(write_tiny(tmp_path / str(is_upstream), TinySpec(seed=4, upstream=is_upstream)))
        logits.append(run_in_chunks(family, fresh_pool(family), tokens, 50))
    assert torch.equal(*logits)
