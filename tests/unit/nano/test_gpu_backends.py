"""The fused GPU paths of training against their plain torch definitions. Skipped without CUDA."""

from __future__ import annotations

import pytest
import torch

from models.nano.attention import Sight, attend_chunked, attend_dense
from models.nano.sinkhorn import sinkhorn, sinkhorn_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The compiler advises it for fp32 products; the comparison wants them exact.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def test_sinkhorn_kernel_equals_plain_torch_forward_and_backward() -> None:
    logits = torch.randn(777, 4, 4, device="cuda", requires_grad=True)
    wanted = sinkhorn_steps(logits, 20, 1e-6)[-1]
    upstream = torch.randn_like(wanted)
    (expected,) = torch.autograd.grad(wanted, logits, upstream)
    got = sinkhorn(logits, 20, 1e-6)
    (gradient,) = torch.autograd.grad(got, logits, upstream)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_compiled_chunked_attention_equals_dense_attention_with_gradients(ratio: int) -> None:
    torch.manual_seed(0)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]], dtype=torch.int32, device="cuda")
    tokens = documents.shape[1] * 128
    make = lambda *shape: torch.randn(*shape, device="cuda", requires_grad=True)  # noqa: E731
    q, kv, sink = make(2, 8, tokens, 128), make(2, tokens, 128), make(8)
    entries = make(2, tokens // ratio, 128) if ratio else None
    chosen = torch.rand(2, tokens, tokens // 4, device="cuda") < 0.3 if ratio == 4 else None
    inputs = [each for each in (q, kv, entries, sink) if each is not None]
    sight = Sight(documents, 128, ratio, chosen)
    results = []
    for attend in (attend_dense, torch.compile(attend_chunked, dynamic=False)):
        out, total = attend(q, kv, entries, sink, sight)
        results.append((out, total, *torch.autograd.grad(out.square().sum() + total.sum(), inputs)))
    for wanted, got in zip(*results, strict=True):
        error = (got - wanted).norm() / wanted.norm()
        assert error < 5e-3, f"relative error {error:.1e}"
