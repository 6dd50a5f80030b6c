"""The training modules: equal to transformers, indifferent to packing, and with true gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.nano.attention import Sight, attend_chunked, attend_dense
from models.nano.config import NanoConfig
from models.nano.export import unstacked
from models.nano.initial import initialise
from models.nano.model import Nano, Rows
from models.nano.sinkhorn import sinkhorn, sinkhorn_steps


def randomised(config: NanoConfig) -> Nano:
    """A model in which every parameter matters: sinks, position biases, norms and routing biases are random too."""
    model = Nano(config, attend_chunked)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(("attn_sink", "ape", "_base")):
                weight.normal_(generator=generator)
            elif name.endswith("_scale"):
                weight.fill_(1.0)
        for layer in model.blocks():
            if not layer.ffn.gate.hashed:
                layer.ffn.gate.bias.normal_(0, 0.1, generator=generator)
    return model.eval()


def upstream_json(config: NanoConfig) -> str:
    """config.json of a NanoConfig, without quantization."""
    raw: dict[str, object] = {name: getattr(config, name) for name in NanoConfig.__slots__ if name != "yarn"}
    yarn = config.yarn
    raw["rope_scaling"] = {
        "type": "yarn",
        "factor": yarn.factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "original_max_position_embeddings": yarn.original_positions,
    }
    fixed = {"model_type": "deepseek_v4", "num_key_value_heads": 1, "max_position_embeddings": 8192}
    return json.dumps(raw | fixed | {"architectures": ["DeepseekV4ForCausalLM"]})


def one_row(ids: Tensor) -> Rows:
    return Rows(ids, torch.zeros(ids.shape[0], ids.shape[1] // 128, dtype=torch.int32))


@pytest.mark.filterwarnings("ignore")
def test_logits_equal_transformers(tiny: NanoConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = randomised(tiny)
    (tmp_path / "config.json").write_text(upstream_json(tiny))
    save_file(
        {name: weight.contiguous() for name, weight in unstacked(model.state_dict())}, tmp_path / "model.safetensors"
    )
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(3, tiny.vocab_size, (1, 384), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted, got = reference(ids, use_cache=False).logits, model.logits(one_row(ids))
    assert wanted.std() > 0.2
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=0)


def test_packed_documents_do_not_see_each_other(tiny: NanoConfig) -> None:
    model = randomised(tiny)
    first, second = (torch.randint(3, 256, (1, 128 * blocks)) for blocks in (2, 3))
    packed = Rows(torch.cat((first, second), 1), torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32))
    with torch.no_grad():
        together = model.logits(packed)
        apart = torch.cat((model.logits(one_row(first)), model.logits(one_row(second))), 1)
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=0)


def test_indexer_choice_matters_and_dense_flag_lifts_it(tiny: NanoConfig) -> None:
    model = randomised(tiny)
    rows = one_row(torch.randint(3, 256, (1, 256)))
    with torch.no_grad():
        sparse = model.logits(rows)
        dense = model.logits(Rows(rows.ids, rows.documents, None, torch.tensor(True)))
    seen = 4 * tiny.index_topk
    torch.testing.assert_close(sparse[:, :seen], dense[:, :seen], atol=1e-4, rtol=0)
    assert (sparse[:, seen:] - dense[:, seen:]).abs().max() > 1e-3


def test_index_loss_trains_only_the_indexer(tiny: NanoConfig) -> None:
    model = randomised(tiny)
    rows = one_row(torch.randint(3, 256, (1, 256)))
    _, loss, _ = model(Rows(rows.ids, rows.documents, torch.tensor([[1]])))
    loss.backward()
    touched = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert touched
    assert all(".indexer." in name for name in touched)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_chunked_attention_equals_dense_attention_with_gradients(ratio: int) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.int32)
    shapes = [(2, 2, 512, 32), (2, 512, 32), (2,), *([(2, 512 // ratio, 32)] if ratio else [])]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    q, kv, sink, entries = (*inputs, None)[:4]
    chosen = torch.rand(2, 512, 128, generator=generator) < 0.3 if ratio == 4 else None
    results = []
    for attend in (attend_dense, attend_chunked):
        out, total = attend(q, kv, entries, sink, Sight(documents, 128, ratio, chosen))
        results.append((out, total, *torch.autograd.grad(out.square().sum() + total.sum(), inputs)))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-4)


def test_sinkhorn_gradient_equals_autograd() -> None:
    logits = torch.randn(5, 4, 4, requires_grad=True)
    upstream = torch.randn(5, 4, 4)
    (wanted,) = torch.autograd.grad(sinkhorn_steps(logits, 20, 1e-6)[-1], logits, upstream)
    result = sinkhorn(logits, 20, 1e-6)
    (got,) = torch.autograd.grad(result, logits, upstream)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(result.sum(-2), torch.ones(5, 4), atol=1e-5, rtol=0)


def test_rows_must_be_whole_blocks(tiny: NanoConfig) -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        Nano(tiny)(Rows(torch.zeros(1, 100, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)))
