"""Triton backend of the engine's operators: decode's own kernels, torch where a device's library is as good."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kernels import reference
from kernels.reference.route import route
from kernels.triton.engine import invariant
from kernels.triton.engine.attend import attend
from kernels.triton.engine.compress import compress
from kernels.triton.engine.experts import experts
from kernels.triton.engine.index import index_topk, store_index_key
from kernels.triton.engine.latent import attend_latent, read_rows, store_latent
from kernels.triton.engine.likeliest import likeliest
from kernels.triton.engine.linear import linear
from kernels.triton.engine.mla_layer import after_attention, mla_layer, norm_linear
from kernels.triton.engine.routing import route_groups
from kernels.triton.engine.rows import latent, norm, store_rows
from kernels.triton.engine.streams import hyper_head, hyper_post, hyper_pre

OPS = replace(
    reference.OPS,
    name="triton",
    captures=True,
    linear=linear,
    hyper_pre=hyper_pre,
    hyper_post=hyper_post,
    hyper_head=hyper_head,
    latent=latent,
    compress=compress,
    index_topk=index_topk,
    attend=attend,
    store_rows=store_rows,
    route=partial(route, product=linear),
    experts=experts,
    norm=norm,
    store_latent=store_latent,
    attend_latent=attend_latent,
    store_index_key=store_index_key,
    read_rows=read_rows,
    route_groups=route_groups,
    mla_layer=mla_layer,
    norm_linear=norm_linear,
    after_attention=after_attention,
    apart=True,
    likeliest=likeliest,
)

# As `OPS`, and no row's bits depend on its batch.
INVARIANT = replace(
    OPS,
    batch_invariant=True,
    linear=invariant.linear,
    hyper_pre=invariant.hyper_pre,
    hyper_head=invariant.hyper_head,
    attend=invariant.attend,
    route=invariant.route,
    experts=invariant.experts,
    attend_latent=invariant.attend_latent,
    route_groups=invariant.route_groups,
    mla_layer=invariant.layer_with(invariant.attend_latent),
    norm_linear=invariant.norm_linear,
    after_attention=invariant.after_attention,
)
