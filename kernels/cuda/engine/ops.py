"""CUDA backend of the engine's operators, for Hopper: Triton's, and the faster kernels where `domain` admits them."""

from __future__ import annotations

from dataclasses import replace

from kernels.cuda.engine.attend import attend
from kernels.cuda.engine.choice import index_topk, route, route_groups
from kernels.cuda.engine.latent import attend_latent
from kernels.cuda.engine.mla_layer import mla_layer
from kernels.triton.engine.ops import OPS as TRITON

OPS = replace(
    TRITON,
    name="cuda",
    index_topk=index_topk,
    attend=attend,
    route=route,
    attend_latent=attend_latent,
    route_groups=route_groups,
    mla_layer=mla_layer,
)
