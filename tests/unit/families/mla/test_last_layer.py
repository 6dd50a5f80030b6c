"""The last layer runs for the rows whose logits are wanted alone: no result and no cached row changes by it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.tiny_mla import FAMILIES, WIDE, Piece, TinySpec, batch_of, open_tiny, poisoned_pool, random_tokens
from tests.support.tiny_mla import write_tiny as write

PIECES = ((40, 0), (23, 0), (1, 0))  # (tokens, context)


def run(folder: Path, wanted: list[int], invariant: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the wanted rows of one batch of prompts, and the memory it leaves."""
    family = open_tiny(folder, batch_invariant=invariant)
    pool = poisoned_pool(family)
    pieces = [
        Piece(random_tokens(count, i), context, range(4 * i, 4 * i + 4), i) for i, (count, context) in enumerate(PIECES)
    ]
    batch = dataclasses.replace(batch_of(pieces), logit_rows=np.array(wanted, np.int64))
    return family.forward(batch, pool), pool.blocks.clone()


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_wanted_rows_get_the_logits_they_have_among_all_and_every_row_is_cached(
    tmp_path: Path, family: str, invariant: bool
) -> None:
    folder = write(tmp_path, TinySpec(family, 2, {} if invariant else WIDE))
    everything, expected = run(folder, list(range(64)), invariant)
    for wanted in ([39, 62, 63], [63, 5], []):
        logits, memory = run(folder, wanted, invariant)
        assert logits.shape == (len(wanted), everything.shape[1])
        assert torch.equal(memory.view(torch.uint8), expected.view(torch.uint8))
        if invariant:
            assert torch.equal(logits, everything[wanted])
        else:
            assert torch.allclose(logits, everything[wanted], atol=1e-3)
