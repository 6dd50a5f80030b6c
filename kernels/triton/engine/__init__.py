"""Triton backend of the engine's operators: decode's own kernels, torch where a device's library is as good."""

from __future__ import annotations

from dataclasses import replace

from kernels import reference
from kernels.triton.engine.experts import experts
from kernels.triton.engine.latent import attend_latent, store_latent
from kernels.triton.engine.linear import linear
from kernels.triton.engine.mla_layer import mla_layer
from kernels.triton.engine.routing import route_groups

OPS = replace(
    reference.OPS,
    name="triton",
    captures=True,
    linear=linear,
    experts=experts,
    store_latent=store_latent,
    attend_latent=attend_latent,
    route_groups=route_groups,
    mla_layer=mla_layer,
)
