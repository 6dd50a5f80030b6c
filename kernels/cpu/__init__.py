"""CPU backend: fused kernels compiled by numba, batch-invariant by construction (see cpu/tile.py)."""

from __future__ import annotations

import numba
import torch

from kernels.cpu.attend import attend
from kernels.cpu.compress import compress
from kernels.cpu.experts import experts
from kernels.cpu.hyper import hyper_head, hyper_post, hyper_pre
from kernels.cpu.index import index_topk
from kernels.cpu.latent import latent
from kernels.cpu.linear import linear, pack
from kernels.cpu.mla import attend_latent
from kernels.cpu.mla_expanded import attend_expanded
from kernels.cpu.mla_layer import mla_layer
from kernels.cpu.mla_rows import norm, store_index_key, store_latent
from kernels.cpu.route import route
from kernels.cpu.route_groups import route_groups
from kernels.cpu.storage import store_rows
from kernels.ops import Ops
from kernels.reference.mla import read_rows


def _launch() -> None:
    """Start numba's thread pool. It is OpenMP's, which torch shares, and starting it would change torch's count."""
    threads = torch.get_num_threads()
    _use_threads()
    torch.set_num_threads(threads)


def _use_threads() -> None:
    """numba keeps its thread count per calling thread; torch's is the one dial."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


_launch()
OPS = Ops(
    name="cpu",
    batch_invariant=True,
    begin=_use_threads,
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
