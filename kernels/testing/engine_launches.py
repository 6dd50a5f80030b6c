"""Every launch of the engine's triton operators once, in the shapes of published models. Computes nothing that counts.

Written to be compiled (kernels.ahead): operands are memory that nobody has filled.
"""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from kernels.csa2 import PoolSpec
from kernels.cuda import gemm as products
from kernels.cuda import sparse_decode
from kernels.cuda.engine import index as chosen_keys
from kernels.cuda.engine import named, records, scaled, window_records
from kernels.cuda.engine.latent import rotated
from kernels.operands import (
    AttentionSpec,
    CompressorSpec,
    ExpertBank,
    GroupRouterSpec,
    HyperHead,
    HyperSite,
    IndexerSpec,
    IndexKeySpec,
    IndexMixing,
    LatentSpec,
    MlaSpec,
    Pages,
    Ragged,
    Ring,
    RopeTable,
    Selection,
    Windows,
)
from kernels.reference.gemm import Fp8Weights
from kernels.reference.linear import Dense
from kernels.reference.scaled import Scaled, ScaledExperts
from kernels.triton.engine import (
    attend,
    compress,
    experts,
    few_experts,
    index,
    invariant,
    latent,
    likeliest,
    linear,
    precise,
    routing,
    rows,
    streams,
)

_PAGE, _PAGES = 64, 4


def launch_all(dtype: torch.dtype) -> None:
    """One row and many, of a model whose compute type is `dtype`."""
    for count in (1, 8):
        batch = _decode(count)
        _mla(batch, dtype)
        _moe(count, dtype)
        _norms(count, dtype)
        _choice(count)
        _streams(count)
        _compressed(batch, dtype)
        invariant.linear(_empty(count, 2048), _dense(dtype, 1, 2048, 2048))
        if dtype == torch.bfloat16:
            _named(batch)
            _records(batch)
            _window_records(batch)
            with patch.object(products, "gemm"):  # CUDA C++ is compiled and looked at elsewhere
                _stored(count)


def _named(batch: Ragged) -> None:
    """Triton's parts of attention on Hopper: which rows of a cache are read, and what becomes of the parts."""
    count, rope = batch.rows, RopeTable(_empty(64, 32), _empty(64, 32))
    spec = MlaSpec(
        heads=128, nope=128, rope=64, value=128, rank=512, column=0, norm=_empty(512), norm_eps=1e-6, scale=0.1,
        absorb=None, output=None, expand=None,
    )  # fmt: skip
    rotated(_empty(count, 128 * 512), _empty(count, 128 * 64), spec, batch, rope)
    chosen = Selection(_numbers(count, 2048), _numbers(count))
    for pages, selection in ((_pages(576, 1, torch.bfloat16), chosen), (_pages(512, 128, torch.bfloat16), None)):
        named.in_pages(batch, pages, selection)
    named.in_ring(batch, _ring(136, 512, torch.bfloat16), 128)
    named.in_batch(batch, torch.empty(count, 512, dtype=torch.bfloat16), 128)
    part = named.Mixed(torch.empty(count, 64, 512, dtype=torch.bfloat16), _empty(count, 64))
    attention = AttentionSpec(64, 512, 128, _empty(64), 1e-6)
    for parts in (2, 3):
        named.joined([part] * parts, attention, batch, rope)


def _records(batch: Ragged) -> None:
    """Triton's parts of caches of published records: V3.2's latents and index keys, and queries that meet those."""
    count, rope = batch.rows, RopeTable(_empty(64, 32), _empty(64, 32))
    spec = MlaSpec(
        heads=128, nope=128, rope=64, value=128, rank=512, column=1536, norm=_empty(512), norm_eps=1e-6, scale=0.1,
        absorb=None, output=None, expand=None,
    )  # fmt: skip
    latents, keys = _pages(656, 1, torch.uint8), _pages(128, 1, torch.uint8)
    records.store_latent(_empty(count, 2304), spec, batch, latents, rope)
    few = replace(spec, heads=16, absorb=_dense(torch.bfloat16, 16, 512, 128))  # as a chain
    query = latent.absorb(_empty(count, 16 * 192), _empty(count, 2112), few, batch, latents, rope)
    latent.attend(query, few, batch, latents, None)
    keys = replace(keys, scales=_pages(1, 1, torch.float32))
    for powers in (False, True):
        mixing = IndexMixing(_empty(128, 128), powers)
        key = IndexKeySpec(2112, _empty(128), _empty(128), 1e-6, mixing)
        chosen_keys.store_index_key(_empty(count, 2304), key, batch, keys, rope)
        asked = IndexerSpec(24_576, 2240, 64, 128, 2048, mixing)
        with patch.object(chosen_keys, "_choose"):  # CUDA C++, too
            operands = (_empty(count, 32_768), _empty(count, 2304), asked, mixing, batch, keys, rope)
            chosen_keys.index_topk(*operands, chosen_keys.workspaces())


def _window_records(batch: Ragged) -> None:
    """Triton's parts of caches of V4's and V4.1's records: rows, entries, index keys, and which of them are read."""
    count, rope = batch.rows, RopeTable(_empty(64, 32), _empty(64, 32))
    compressor = CompressorSpec(0, 4, 512, True, _empty(4, 1024), _empty(512), 1e-6)
    projected, mixing = _empty(count, 2048), IndexMixing(_empty(128, 128), False)
    keys = replace(_pages(128, 4, torch.uint8), scales=_pages(1, 4, torch.float32))
    attention = AttentionSpec(64, 512, 128, _empty(64), 1e-6)
    for row, entry, apart in ((576, 576, 8), (528, 288, 0)):
        ring, entries = _ring(136, row + apart, torch.uint8), _pages(entry + apart, 4, torch.uint8)
        ring, entries = replace(ring, width=row), replace(entries, width=entry)
        if apart:
            ring = replace(ring, scales=replace(ring, offset=136 * row, width=apart))
            entries = replace(entries, scales=replace(entries, offset=entries.entries * entry, width=apart))
            state = _ring(8, 2048, torch.float32)
            records.compress(projected, compressor, batch, state, entries, rope)
            records.compress(projected, replace(compressor, width=128, mixing=mixing), batch, state, keys, rope)
        records.store_entries(_empty(count, 512), batch, entries)
        window_records.store_rows(_empty(count, 512), 0, batch, ring)
        for room in (ring, replace(ring, capacity=127)):  # beside the window for a new row, and for none
            operands = (_empty(count, 64 * 512), _empty(count, 512), attention, batch, room, entries, None, rope)
            with patch.object(sparse_decode, "sparse_decode"), patch.object(records, "multiprocessors", lambda _: 132):
                window_records.attend(*operands)
    heads = index.turn_heads(_empty(count, 32 * 128), 0, 32, 128, _numbers(count), rope)
    published = _pages(68, 4, torch.uint8)
    records.store_entries(_empty(count, 128), batch, published)
    index.score_entries(heads, _empty(count, 32), 32, 128, batch, published)


def _stored(count: int) -> None:
    """Triton's parts of a product and of experts of stored weights, V3's."""

    def kept(groups: int, outputs: int, channels: int) -> Scaled:
        codes = torch.empty(groups, outputs, channels, dtype=torch.float8_e4m3fn)
        return Scaled(Fp8Weights(codes, _empty(groups, outputs // 128, channels // 128)), None)

    scaled.linear(_empty(count, 7168), kept(1, 1536, 7168))
    for width in (1536, 7168):
        scaled.norm_linear(_empty(count, width), _empty(width), 1e-6, kept(1, 1536, width))
    pairs = [(kept(experts, 4096, 7168), kept(experts, 7168, 2048)) for experts in (2, 1)]
    for limit in (math.inf, 10.0):
        bank = ExpertBank(ScaledExperts(*pairs), None, None, 2, 2048, limit)
        scaled.experts(_empty(count, 7168), _numbers(count, 2), _empty(count, 2), bank, _empty(count, 7168))


def _mla(batch: Ragged, dtype: torch.dtype) -> None:
    """DeepSeek-V3: rank 512 and 64 rotated channels."""
    spec = MlaSpec(
        heads=16, nope=128, rope=64, value=128, rank=512, column=1536, norm=_empty(512), norm_eps=1e-6, scale=0.1,
        absorb=_dense(dtype, 16, 512, 128), output=_dense(dtype, 16, 128, 512), expand=None,
    )  # fmt: skip
    pages, rope, count = _pages(576, 1, dtype), RopeTable(_empty(64, 32), _empty(64, 32)), batch.rows
    latent.store_latent(_empty(count, 2112), spec, batch, pages, rope)
    query = latent.absorb(_empty(count, 16 * 192), _empty(count, 2112), spec, batch, pages, rope)
    latent.leave(*latent.attend(query, spec, batch, pages, None), spec.output)
    chosen = Selection(_numbers(count, 2048), _numbers(count))
    latent.attend_latent(_empty(count, 8192), _empty(count, 1024), spec, batch, pages, chosen, rope)
    key = IndexKeySpec(0, _empty(128), _empty(128), 1e-6)
    index.store_index_key(_empty(count, 128), key, batch, _pages(128, 1, dtype), rope)


def _moe(count: int, dtype: torch.dtype) -> None:
    """A router of 256 experts in 8 groups, and a bank."""
    gate = _dense(torch.float32, 1, 256, 2048)
    router = GroupRouterSpec(gate, _empty(256), 256, 8, 8, 4, 2, True, True, 2.5, 0)
    chosen, weights = routing.choose_in_groups(_empty(count, 256), router)
    bank = ExpertBank(
        _dense(dtype, 2, 1408, 2048), _dense(dtype, 2, 1408, 2048), _dense(dtype, 2, 2048, 1408), 1, 1408, math.inf
    )
    x = _empty(count, 2048)
    experts.expert_rows(x, chosen, weights, bank, _empty(2048), 1e-6, x)
    if count <= linear.FEW_ROWS:
        linear.few_rows(x, _dense(dtype, 1, 2048, 2048), _empty(2048), 1e-6)
        linear.few_rows(x, _dense(dtype, 1, 2048, 2048), residual=x)
        few_experts.routed_rows(x, router, bank, _empty(2048), 1e-6, x)


def _norms(count: int, dtype: torch.dtype) -> None:
    """Of rows as wide as V2-Lite's and V3's, and the product of V3's router."""
    for width in (2048, 7168):
        rows.norm(_empty(count, width), _empty(width), 1e-6, dtype)
        rows.add_norm(_empty(count, width), _empty(count, width), _empty(width), 1e-6, dtype)
    precise.precise(_empty(count, 7168), _dense(torch.float32, 1, 256, 7168))


def _choice(count: int) -> None:
    """The vocabulary of DeepSeek-V3."""
    likeliest.likeliest(_empty(count, 129_280))


def _streams(count: int) -> None:
    """Hyper-connections of four streams."""
    x, wide = _empty(count, 4, 4096), _dense(torch.float32, 1, 24, 16384)
    site = HyperSite(wide, _empty(24), _empty(3), _empty(4096), 4, 20, 1e-6, 1e-6)
    streams.hyper_pre(x, site)
    streams.hyper_mix(x, site)
    streams.hyper_post(x, _empty(count, 4096), _empty(count, 4), _empty(count, 4, 4))
    head = HyperHead(_dense(torch.float32, 1, 4, 16384), _empty(4), _empty(1), _empty(4096), 4, 1e-6, 1e-6)
    streams.hyper_head(x, head)
    streams.hyper_collapse(x, _empty(count, 4), _empty(4096), 1e-6)


def _compressed(batch: Ragged, dtype: torch.dtype) -> None:
    """DeepSeek-V4: keys of 512 channels, rates 4 and 128, an indexer of 64 heads."""
    count, rope = batch.rows, RopeTable(_empty(64, 32), _empty(64, 32))
    spec = LatentSpec(_empty(1024), _empty(512), 1e-6)
    _, keys = rows.latent(_empty(count, 1536), spec, batch, rope, dtype)
    ring = _ring(136, 512, dtype)
    rows.store_rows(keys, 0, batch, ring)
    for rate, overlap in ((4, True), (128, False)):
        parts = 2 if overlap else 1
        compressor = CompressorSpec(0, rate, 512, overlap, _empty(rate, parts * 512), _empty(512), 1e-6)
        state = _ring(2 * rate, 2 * parts * 512, torch.float32)
        compress.compress(_empty(count, 2 * parts * 512), compressor, batch, state, _pages(512, rate, dtype), rope)
    compress.pool(_empty(count, 1024), PoolSpec(0, 4, 512, _empty(512), 1e-6), batch, _ring(4, 1024, torch.float32))
    compress.store_entries(_empty(count, 512), batch, _pages(512, 4, dtype))
    attention, queries = AttentionSpec(64, 512, 128, _empty(64), 1e-6), _empty(count, 64 * 512)
    chosen = Selection(_numbers(count, 512), _numbers(count))
    for pages, selection in ((None, None), (_pages(512, 128, dtype), None), (_pages(512, 4, dtype), chosen)):
        attend.attend(queries, keys, attention, batch, ring, pages, selection, rope)
    heads = index.turn_heads(_empty(count, 64 * 128), 0, 64, 128, _numbers(count), rope)
    index.score_entries(heads, _empty(count, 64), 64, 128, batch, _pages(128, 4, dtype))


def _decode(count: int) -> Ragged:
    """Sequences of one new row, each of which completes a window of either rate."""
    zeros = np.zeros(count, np.int32)
    done = Windows(zeros, zeros)
    return Ragged(
        zeros, zeros, zeros, np.arange(count + 1, dtype=np.int32), zeros, zeros, np.zeros((count, _PAGES), np.int32),
        {4: done, 128: done},
    )  # fmt: skip


def _pages(width: int, rate: int, dtype: torch.dtype) -> Pages:
    entries = max(1, _PAGE // rate)
    return Pages(torch.empty(_PAGES, entries * width, dtype=dtype), None, 0, entries, width, rate)


def _ring(capacity: int, width: int, dtype: torch.dtype) -> Ring:
    return Ring(torch.empty(1, capacity * width, dtype=dtype), None, 0, capacity, width)


def _dense(dtype: torch.dtype, groups: int, outputs: int, inner: int) -> Dense:
    return Dense(torch.empty(groups, outputs, inner, dtype=dtype), dtype == torch.bfloat16)


def _empty(*shape: int) -> Tensor:
    return torch.empty(*shape)


def _numbers(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32)
