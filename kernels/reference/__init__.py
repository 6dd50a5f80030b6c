"""Reference backend: every operator in plain torch, written to be read. The others are tested against it."""

from __future__ import annotations

from contextlib import nullcontext

from kernels.ops import Ops
from kernels.reference.attend import attend
from kernels.reference.compress import compress
from kernels.reference.experts import experts
from kernels.reference.hyper import hyper_head, hyper_post, hyper_pre
from kernels.reference.index import index_topk
from kernels.reference.latent import latent
from kernels.reference.linear import linear, pack
from kernels.reference.mla import attend_expanded, attend_latent, read_rows, store_index_key, store_latent
from kernels.reference.mla_layer import mla_layer
from kernels.reference.norm import norm
from kernels.reference.route import route
from kernels.reference.route_groups import route_groups
from kernels.reference.storage import store_rows

OPS = Ops(
    name="reference",
    batch_invariant=False,
    begin=nullcontext,  # torch needs no preparation per thread
    pack=pack,
    linear=linear,
    hyper_pre=hyper_pre,
    hyper_post=hyper_post,
    hyper_head=hyper_head,
    latent=latent,
    compress=compress,
    index_topk=index_topk,
    attend=attend,
    store_rows=store_rows,
    route=route,
    experts=experts,
    norm=norm,
    store_latent=store_latent,
    store_index_key=store_index_key,
    attend_latent=attend_latent,
    read_rows=read_rows,
    attend_expanded=attend_expanded,
    route_groups=route_groups,
    mla_layer=mla_layer,
)
