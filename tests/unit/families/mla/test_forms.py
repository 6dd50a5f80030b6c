"""The form of attention follows its cost: un-absorbed for long prefill, absorbed for decode and short extends."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.families.mla.config import parse
from engine.families.mla.forms import is_cheaper_expanded
from engine.families.mla.tiny import TINY
from tests.support.tiny_mla import WIDE, TinySpec, open_tiny, write_tiny

PUBLISHED = {**TINY["v3"], "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("context", "new", "expanded"),
    [(0, 4096, True), (4096, 512, True), (0, 1, False), (4096, 1, False), (100_000, 16, False)],
)
def test_published_shapes_expand_for_long_chunks_alone(context: int, new: int, expanded: bool) -> None:
    assert is_cheaper_expanded(parse(PUBLISHED), context, new) is expanded


def test_a_selection_makes_expanding_a_long_context_dear() -> None:
    sparse = {**PUBLISHED, **{k: TINY["v32"][k] for k in ("model_type", "index_n_heads", "index_topk")}}
    config = parse({**sparse, "architectures": ["DeepseekV32ForCausalLM"], "index_head_dim": 128})
    assert not is_cheaper_expanded(config, 100_000, 512)


def test_the_wide_tiny_model_uses_both_forms() -> None:
    config = parse({**TINY["v3"], **WIDE})
    assert [is_cheaper_expanded(config, *spans) for spans in ((0, 90), (40, 40), (89, 1))] == [True, True, False]


def test_the_invariant_mode_keeps_no_weights_for_the_unabsorbed_form(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, TinySpec("v3", 1))
    kept = {mode: open_tiny(folder, batch_invariant=mode).weights.layers[0].attention.expand for mode in (True, False)}
    assert kept[True] is None
    assert kept[False] is not None
