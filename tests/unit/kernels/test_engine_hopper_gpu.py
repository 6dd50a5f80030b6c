"""The engine with the Hopper kernels: bf16 models of published head widths give the reference's tokens through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.families.mla import tiny as mla
from engine.families.v4 import tiny as v4
from engine.families.v41 import tiny as v41
from tests.unit.kernels.test_engine_gpu import NANO, agreeing

pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
from kernels.cuda import dense_decode, gate, sparse_prefill, top_k
from kernels.cuda.engine import domain, scaled
from kernels.operands import ExpertBank
from kernels.reference import scaled as definition
from kernels.reference.gemm import quantize_fp4, quantize_fp8
from kernels.testing.gemm import FORMATS

_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _HOPPER, reason="needs a Hopper GPU")]
# Log probabilities that roundings on the way may put in another order: of queries, weights and mixtures to bf16, and of
# FP8 products, whose sums tensor cores keep to some 13 bits, so that codes of what follows fall to the other side.
NEAR = 0.25
AGREEING = 0.7  # of prompts, at least; of other tokens than the reference's, a third would lie that near
# All experts, all groups and all entries are chosen: in a random model a choice on the edge would change everything.
_ALL = {"num_experts_per_tok": 8, "index_head_dim": 128, "index_topk": 128}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 16, "num_key_value_heads": 16}
_SHARED = {"head_dim": 512, "num_attention_heads": 16, **_ALL}
KERNELS = {"dense": (dense_decode, "dense_decode"), "named": (sparse_prefill, "sparse_prefill"),
           "gate": (gate, "gate"), "top_k": (top_k, "top_k")}  # fmt: skip


def write(family: str, folder: Path) -> Path:
    """A small model whose caches have the widths that the kernels are for."""
    if family in mla.TINY:
        chosen = {key: value for key, value in _ALL.items() if family == "v32" or not key.startswith("index")}
        return mla.write_tiny(folder, mla.TinySpec(family, changes={**_LATENT, **chosen, "topk_group": 4}))
    if family == "v4":
        return v4.write_tiny(folder, v4.TinySpec(overrides=tuple({**_SHARED, "partial_rotary_factor": 0.125}.items())))
    return v41.write_tiny(folder, v41.TinySpec(overrides=tuple({**_SHARED, "qk_rope_head_dim": 64}.items())))


def opened(folder: Path, kernels: str, device: str) -> Engine:
    given = {"kernels": kernels, "device": device, "max_sequences": 4, "max_batch_tokens": 256}
    return Engine.open(EngineConfig(folder, "bfloat16", num_blocks=64, **given))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each kernel is launched, of small batches as well; a graph's replays are not seen."""
    counts: Counter[str] = Counter()

    def counted(name: str, launch: Callable[..., Any], *arguments: Any) -> None:
        counts[name] += 1
        launch(*arguments)

    for name, (module, function) in KERNELS.items():
        monkeypatch.setattr(module, function, partial(counted, name, getattr(module, function)))
    monkeypatch.setattr(domain, "_LEAST_ROWS", 1)
    monkeypatch.setattr(domain, "_LEAST_LAYER_ROWS", 1)
    monkeypatch.setattr(domain, "_LEAST_BLOCKS", 1)
    yield counts


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("v2", {"dense"}),
        ("v3", {"dense", "gate"}),
        ("v32", {"named", "gate", "top_k"}),
        ("v4", {"named", "gate", "top_k"}),
        ("v41", {"named", "gate", "top_k"}),
    ],
)
def test_wide_models_give_the_references_tokens_through_the_kernels(
    family: str, kernels: set[str], tmp_path: Path, launched: Counter[str]
) -> None:
    folder = write(family, tmp_path / "model")
    if family in mla.TINY:
        reference, prompts = opened(folder, "reference", "cpu"), 16
    else:  # the reference takes minutes; the triton operators have its tokens where models are narrow
        reference, prompts = opened(folder, "triton", "cuda"), 16
    share = agreeing(opened(folder, "cuda", "cuda"), reference, prompts, NEAR)
    print(f"{family}: {share:.0%} of {prompts} prompts agree, {dict(launched)}")
    assert share >= AGREEING
    assert kernels <= {name for name, count in launched.items() if count}


def test_nano_gives_the_references_tokens_from_weights_as_they_are_published() -> None:
    """FP8 projections and FP4 experts: the reference casts activations as the kernels do."""
    given = {"num_blocks": 64, "max_sequences": 4, "max_batch_tokens": 256, "weights": "stored"}
    engine = Engine.open(EngineConfig(NANO, kernels="cuda", device="cuda", **given))
    share = agreeing(engine, Engine.open(EngineConfig(NANO, kernels="reference", **given)), 24, NEAR)
    print(f"nano: {share:.0%} of 24 prompts agree")
    assert share >= AGREEING


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_products_of_stored_weights_are_the_defined_ones(form: str, rows: int) -> None:
    draw = torch.Generator("cuda").manual_seed(rows)
    quantize = quantize_fp4 if form == "fp4" else partial(quantize_fp8, grain=int(form.split()[1]))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device="cuda")

    weights, order = quantize(random(2, 192, 256)), torch.randperm(384, generator=draw, device="cuda")
    x = random(rows, 512)
    assert_near(scaled.linear(x, scaled.keep(weights, order)), definition.linear(x, definition.keep(weights, order)))
    matrices = [quantize(random(*shape) / 16) for shape in ((6, 512, 384), (6, 384, 256), (1, 512, 384), (1, 384, 256))]
    banks = []
    for keep in (scaled.keep, definition.keep):
        entering, leaving, shared_in, shared_out = (keep(matrix) for matrix in matrices)
        kept = definition.ScaledExperts((entering, leaving), (shared_in, shared_out))
        banks.append(ExpertBank(kept, None, None, 6, 256, 1.5))
    x, shares = random(rows, 384), torch.rand(rows, 3, generator=draw, device="cuda")
    chosen = torch.rand(rows, 6, generator=draw, device="cuda").argsort(1)[:, :3].int().contiguous()
    assert_near(scaled.experts(x, chosen, shares, banks[0]), definition.experts(x, chosen, shares, banks[1]))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Rounded to bf16 alike, but where sums in another order fall to the other side; E4M3 codes follow them."""
    assert found.dtype == expected.dtype == torch.float32
    error = float((found - expected).norm() / expected.norm())
    assert error < 5e-3, error
