"""The engine over published records on Hopper: the operators are the reference's, and so are models' tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.families.mla import tiny as mla
from tests.unit.kernels.test_engine_gpu import agreeing

pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
from kernels.choose import choose
from kernels.testing import engine_records

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")]
NEAR, AGREEING = 0.25, 0.7  # as tests of bf16 caches have them: more is rounded on the way than what is cached
_WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16}
# All experts and all keys are chosen: in a random model a choice on the edge would change everything.
_ALL = {"num_experts_per_tok": 8, "topk_group": 4}
_INDEX = {"index_head_dim": 128, "index_topk": 128}


def write(family: str, folder: Path) -> Path:
    """A small model whose caches have the widths of published records."""
    changes = {**_WIDE, **_ALL, **(_INDEX if family == "v32" else {})}
    return mla.write_tiny(folder, mla.TinySpec(family, changes=changes))


def opened(folder: Path, kernels: str, device: str, dtype: str = "bfloat16", **more: object) -> Engine:
    given = {"kernels": kernels, "device": device, "max_sequences": 4, "max_batch_tokens": 256, **more}
    return Engine.open(EngineConfig(folder, dtype, num_blocks=64, kv_cache="records", **given))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_operators_over_records_are_the_references(batch_invariant: bool) -> None:
    engine_records.check_all(choose("cuda", "cuda", batch_invariant, records=True), torch.device("cuda"))


@pytest.mark.parametrize("family", ["v2", "v3", "v32"])
def test_models_give_the_references_tokens_over_the_same_records(family: str, tmp_path: Path) -> None:
    folder = write(family, tmp_path / "model")
    engine = opened(folder, "cuda", "cuda")
    assert engine.graphs is not None, "its decode steps are captured"
    share = agreeing(engine, opened(folder, "reference", "cpu"), 16, NEAR)
    print(f"{family}: {share:.0%} of 16 prompts agree")
    assert share >= AGREEING
