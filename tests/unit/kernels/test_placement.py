"""Bits of a CPU kernel are a function of its operands' values: not of where they lie, nor of how loops are compiled."""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher

import kernels.cpu
import kernels.cpu.csa2
from engine.families.v41.model import V41
from kernels import choose
from kernels.cpu.sums import dot, relu_dot, row_sum
from tests.support.tiny import fresh_pool, random_tokens, run_in_chunks
from tests.unit.families.v41.material import DATA, opened
from tests.unit.kernels import test_mla, test_mla_layer, test_operators

PLACES = 6
GAPS = ((0,), (0, 4), (0, 4, 16, 64), (8, 1000))  # bytes between one operand and the next
SEED = 3


def compiled() -> Iterator[tuple[object, str, Dispatcher]]:
    """Every compiled function of the backend, wherever it is bound."""
    for found in pkgutil.iter_modules(kernels.cpu.__path__):
        module = importlib.import_module(f"kernels.cpu.{found.name}")
        for name, value in vars(module).items():
            if isinstance(value, Dispatcher):
                yield module, name, value


def test_no_kernel_leaves_arithmetic_to_the_compiler() -> None:
    options = {f"{kernel.py_func.__module__}.{name}": kernel.targetoptions for _, name, kernel in compiled()}
    assert len(options) > 60
    assert [name for name, chosen in options.items() if chosen.get("fastmath")] == []


def packed(arrays: list[np.ndarray], draw: random.Random, gaps: tuple[int, ...]) -> list[np.ndarray]:
    """Copies in any order in one buffer, right behind one another or with gaps."""
    buffer = np.full(sum(array.nbytes + max(gaps) + array.itemsize for array in arrays) + 64, 0xA5, np.uint8)
    at, copies = draw.choice((0, 4, 8, 32)), [np.empty(0)] * len(arrays)
    for i in draw.sample(range(len(arrays)), len(arrays)):
        at += draw.choice(gaps)
        at += -(at + buffer.ctypes.data) % arrays[i].itemsize
        copies[i] = buffer[at : at + arrays[i].nbytes].view(arrays[i].dtype).reshape(arrays[i].shape)
        copies[i][...] = arrays[i]
        at += arrays[i].nbytes
    return copies


def checked(kernel: Dispatcher, seen: set[str]) -> Callable[..., object]:
    """The kernel, which also computes elsewhere what it is asked for, and wants the same bits."""
    draw = random.Random(SEED)

    def call(*operands: object) -> object:
        where = [i for i, one in enumerate(operands) if isinstance(one, np.ndarray)]
        before = [operands[i].copy() for i in where]
        result = kernel(*operands)
        for turn in range(PLACES):
            elsewhere, copies = list(operands), packed(before, draw, GAPS[turn % len(GAPS)])
            for i, copy in zip(where, copies, strict=True):
                elsewhere[i] = copy
            kernel(*elsewhere)
            for i, copy in zip(where, copies, strict=True):
                assert np.array_equal(copy, operands[i], equal_nan=copy.dtype.kind == "f"), (kernel.py_func, i)
        seen.add(kernel.py_func.__module__)
        return result

    return call


def run_operators() -> None:
    """Operators of every kind, once each, as their own tests call them."""
    ops = choose("cpu")
    test_operators.test_linear_matches_the_reference(ops, 13, 3, 17, 33, False)
    test_operators.test_hyper_connections_match_the_reference(ops, 4, 32, 29)
    test_operators.test_router_matches_the_reference(ops, "learned", 13)
    test_operators.test_experts_match_the_reference(ops, 32, 48, 17, False)
    for dtype in (torch.float32, torch.bfloat16):
        test_operators.test_latent_matches_the_reference(ops, dtype)
        test_operators.test_compressor_matches_the_reference(ops, 4, True, dtype)
        test_operators.test_indexer_chooses_as_the_reference(ops, dtype)
        test_operators.test_attention_matches_the_reference(ops, 8, 32, "chosen", dtype)
        test_mla.test_latent_rows_match_the_reference_and_touch_nothing_else(ops, dtype)
        test_mla.test_index_keys_match_the_reference_and_touch_nothing_else(ops, dtype)
        test_mla.test_absorbed_attention_matches_the_reference(ops, dtype, 6)
        test_mla_layer.test_a_layer_matches_its_operators_and_caches_the_same_rows(dtype, True, True)
    test_mla.test_both_forms_are_one_function(ops, None)
    test_mla.test_grouped_routing_matches_the_reference(ops, 24, 3, 1, 8, True)
    whole(opened(DATA / "tiny-q"), random_tokens(46, 1))


def whole(family: V41, tokens: list[int]) -> torch.Tensor:
    return run_in_chunks(family, fresh_pool(family), tokens, len(tokens))


def test_equal_operands_give_equal_bits_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    run_operators()  # a kernel that is yet to be compiled would not find those that it calls
    seen: set[str] = set()
    for module, name, kernel in list(compiled()):
        if kernel.signatures:
            monkeypatch.setattr(module, name, checked(kernel, seen))
    run_operators()
    assert len(seen) >= 18, seen


PROGRAM = """
import sys
import torch
from kernels.cpu.singlepass import hyper_collapse, norm
draw = torch.Generator().manual_seed(1)
x, pre, weight = (torch.randn(size, generator=draw) for size in ((40, 4, 76), (40, 4), (76,)))
for found in (norm(x[:, 0].contiguous(), weight, 1e-6), hyper_collapse(x, pre, weight, 1e-6)):
    sys.stdout.write(found.numpy().tobytes().hex() + "\\n")
"""


def bits(folder: Path, vectorized: bool) -> list[str]:
    """What PROGRAM computes with kernels that are compiled anew, their loops by the vector or one by one."""
    variables = os.environ | {"NUMBA_LOOP_VECTORIZE": str(int(vectorized)), "NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, check=True, timeout=300
    ).stdout.split()


def test_loops_by_the_vector_give_the_bits_of_loops_one_by_one(tmp_path: Path) -> None:
    """The versions of a loop among which its operands' addresses choose."""
    one_by_one, by_vector = bits(tmp_path / "one", False), bits(tmp_path / "vector", True)
    assert len(one_by_one) == 2
    assert one_by_one == by_vector


@pytest.mark.parametrize("count", [0, 1, 7, 8, 31, 32, 33, 43, 128, 1000])
def test_sums_are_exact_where_fp32_is_and_close_elsewhere(count: int) -> None:
    draw = np.random.default_rng(count)
    for x, y in ((draw.integers(-9, 9, count), draw.integers(-9, 9, count)), draw.standard_normal((2, count))):
        left, right, bar = x.astype(np.float32), y.astype(np.float32), 0 if x.dtype.kind == "i" else 1e-3
        wanted = (left @ right.astype(float), left @ right.clip(0).astype(float), left.sum(dtype=float))
        for found, value in zip((dot(left, right), relu_dot(left, right), row_sum(left)), wanted, strict=True):
            assert abs(found - value) <= bar


@pytest.mark.parametrize("place", [0, 32, 40, 42])
def test_sums_keep_nan_wherever_it_stands(place: int) -> None:
    """In whole steps of 32, of 8, and after them."""
    values, ones = np.ones(43, np.float32), np.ones(43, np.float32)
    values[place] = np.nan
    assert np.isnan((dot(ones, values), relu_dot(ones, values), row_sum(values))).all()
