"""What V2, V3 and V3.2 differ in, one by one: routing, dense layers, rotary settings, the two forms of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tests.support.tiny_mla import (
    FAMILIES,
    TINY,
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
TOKENS = random_tokens(70, 41)


def scaling(family: str, drop: str = "", **changes: Any) -> dict[str, Any]:
    given = {**TINY[family]["rope_scaling"], **changes}
    return {"rope_scaling": {key: value for key, value in given.items() if key != drop}}


DETAILS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2-Lite: greedy, no query latent": ("v2", {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "V2: best experts of the best groups": ("v2", {"q_lora_rank": 48}),
    "V2: one group of four": ("v2", {"topk_group": 1}),
    "V2: unscaled weights": ("v2", {"routed_scaling_factor": 1.0}),
    "V3: one group": ("v3", {"n_group": 1, "topk_group": 1}),
    "V3: one group of four": ("v3", {"topk_group": 1}),
    "V3: weights that need not sum to one": ("v3", {"norm_topk_prob": False}),
    "V3: two shared experts": ("v3", {"n_shared_experts": 2}),
    "V3: no dense layer": ("v3", {"first_k_dense_replace": 0}),
    "V3: dense layers alone": ("v3", {"first_k_dense_replace": 4}),
    "V3: no query latent": ("v3", {"q_lora_rank": None}),
    "V3: no YaRN": ("v3", {"rope_scaling": None}),
    "V3: YaRN far beyond its original context": ("v3", scaling("v3", original_max_position_embeddings=16, factor=40.0)),
    "V3: YaRN without mscale": ("v3", scaling("v3", "mscale")),
    "V3: YaRN without mscale_all_dim": ("v3", scaling("v3", "mscale_all_dim")),
    "V2: YaRN with two different gains": ("v2", scaling("v2", mscale=1.0)),
    "V3.2: a selection of everything": ("v32", {"index_topk": 512}),
    "V3.2: a selection of one": ("v32", {"index_topk": 1}),
    "V3.2: dense layers select as well": ("v32", {"first_k_dense_replace": 3}),
}


def expected(folder: Path) -> torch.Tensor:
    """transformers' logits, without its cache."""
    transformers_logging.disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return reference(torch.tensor([TOKENS]), use_cache=False).logits[0]


@pytest.mark.parametrize("detail", DETAILS)
def test_every_detail_equals_transformers(detail: str, tmp_path: Path) -> None:
    family, changes = DETAILS[detail]
    write_tiny(tmp_path, TinySpec(family, 14, changes))
    model = open_tiny(tmp_path)
    wanted = expected(tmp_path)
    assert wanted.std() > 0.5, "a degenerate checkpoint would prove nothing"
    for chunk in (70, 16):
        found = run_in_chunks(model, poisoned_pool(model), TOKENS, chunk)
        assert (found - wanted).abs().max() <= BAR, f"chunks of {chunk}"


@pytest.mark.parametrize("family", FAMILIES)
def test_both_forms_of_attention_answer_alike(family: str, tmp_path: Path) -> None:
    """Absorbed alone (the invariant mode) beside un-absorbed for long chunks, on one checkpoint and one mixed batch."""
    write_tiny(tmp_path, TinySpec(family, 15, WIDE))
    results = []
    for absorbed_alone in (True, False):
        model = open_tiny(tmp_path, batch_invariant=absorbed_alone)
        pool = poisoned_pool(model)
        long, short = TOKENS, random_tokens(33, 42)
        model.forward(batch_of([Piece(short[:30], 0, range(10, 13), 1)]), pool)
        pieces = [Piece(long, 0, range(5), 0), Piece(short[30:], 30, range(10, 13), 1)]
        results.append(model.forward(batch_of(pieces), pool))
    assert (results[0] - results[1]).abs().max() <= 1e-4
    assert not torch.equal(*results), "two forms round differently: one and the same would mean that only one ran"
