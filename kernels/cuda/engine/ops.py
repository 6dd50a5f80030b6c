"""CUDA backend of the engine's operators, for Hopper: Triton's, and the faster kernels where `domain` admits them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from kernels.cuda.engine import domain, scaled
from kernels.cuda.engine.attend import attend, attend_invariant
from kernels.cuda.engine.choice import index_topk, route, route_groups, route_invariant
from kernels.cuda.engine.index import store_index_key, workspaces
from kernels.cuda.engine.latent import attend_latent, attend_latent_invariant
from kernels.cuda.engine.mla_layer import after_attention, linear, mla_layer, norm_linear
from kernels.cuda.engine.records import compress, store_latent
from kernels.cuda.engine.window_records import store_rows
from kernels.operands import ExpertBank
from kernels.ops import Ops
from kernels.reference.scaled import ScaledExperts
from kernels.triton.engine.invariant import layer_with
from kernels.triton.engine.ops import INVARIANT as TRITON_INVARIANT
from kernels.triton.engine.ops import OPS as TRITON


def experts(x: Tensor, chosen: Tensor, weights: Tensor, bank: ExpertBank) -> Tensor:
    """As reference.experts.experts."""
    of = scaled if isinstance(bank.gate, ScaledExperts) else TRITON
    return of.experts(x, chosen, weights, bank)


def of_one_engine(ops: Ops) -> Ops:
    """The same operators with memory of their own: what two engines launch may overlap."""
    return replace(ops, index_topk=partial(index_topk, workspace_on=workspaces()))


OPS = replace(
    TRITON,
    name="cuda",
    expands=domain.expands,
    linear=linear,
    experts=experts,
    compress=compress,
    index_topk=index_topk,
    attend=attend,
    store_rows=store_rows,
    route=route,
    store_latent=store_latent,
    store_index_key=store_index_key,
    attend_latent=attend_latent,
    route_groups=route_groups,
    mla_layer=mla_layer,
    norm_linear=norm_linear,
    after_attention=after_attention,
)

# As `OPS`, and no row's bits depend on its batch.
INVARIANT = replace(
    TRITON_INVARIANT,
    name="cuda",
    compress=compress,
    index_topk=index_topk,
    attend=attend_invariant,
    store_rows=store_rows,
    route=route_invariant,
    store_latent=store_latent,
    store_index_key=store_index_key,
    attend_latent=attend_latent_invariant,
    mla_layer=layer_with(attend_latent_invariant, store_latent),
)
