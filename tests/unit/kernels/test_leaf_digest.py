"""The leaf-tree digest: its definition, what it detects, and the GPU kernels that must equal it bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.reference.leaf_digest import LEAF_BYTES, leaf_digest
from kernels.testing.leaf_digest import check_kernels, check_late_writer, check_random_flips

MASK = (1 << 64) - 1
BOUNDARIES = [
    1,
    7,
    8,
    9,
    LEAF_BYTES - 8,
    LEAF_BYTES - 1,
    LEAF_BYTES,
    LEAF_BYTES + 1,
    LEAF_BYTES + 8,
    3 * LEAF_BYTES - 3,
]
VECTORS = [
    (b"\x00", 0x0BBB014693D1023B),
    (b"deepinfer", 0xDCABE9F96AED1AFB),
    (bytes(4096), 0xB874A2890296A3E6),
    (bytes(range(256)) * 17, 0x98808CDDE113FC85),
    (b"\xff" * 12_289, 0xF7FD2A137D291A59),
]
sizes = st.one_of(st.sampled_from(BOUNDARIES), st.integers(1, 4 * LEAF_BYTES))
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
    from kernels.triton import leaf_digest as found

    return found


def noise(size: int, seed: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def by_the_letter(data: bytes) -> int:
    """The docstring of the reference in Python's integers, one word at a time."""

    def mix(word: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            word = ((word ^ word >> 33) * factor) & MASK
        return word ^ word >> 33

    def leaf(part: bytes) -> int:
        words = [int.from_bytes(part[start : start + 8], "little") for start in range(0, len(part), 8)]
        keyed = sum(mix(word ^ ((number + 1) * 0x9E3779B97F4A7C15) & MASK) for number, word in enumerate(words))
        return mix((keyed + len(part) * 0xC2B2AE3D27D4EB4F) & MASK)

    leaves = [leaf(data[start : start + 4096]) for start in range(0, len(data), 4096)]
    keyed = sum(mix(value ^ ((number + 1) * 0xD1B54A32D192ED03) & MASK) for number, value in enumerate(leaves))
    return mix((keyed + len(data) * 0xC2B2AE3D27D4EB4F) & MASK)


@given(sizes, seeds)
@settings(max_examples=30)
def test_reference_is_its_docstring(size: int, seed: int) -> None:
    memory = noise(size, seed)
    assert leaf_digest(memory) == by_the_letter(memory.tobytes())


@pytest.mark.parametrize(("data", "digest"), VECTORS)
def test_digest_of_known_bytes_never_changes(data: bytes, digest: int) -> None:
    assert leaf_digest(np.frombuffer(data, np.uint8)) == digest


@given(sizes, seeds, st.data())
def test_every_flipped_bit_changes_the_digest(size: int, seed: int, data: st.DataObject) -> None:
    memory = noise(size, seed)
    before = leaf_digest(memory)
    memory[data.draw(st.integers(0, size - 1))] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    assert leaf_digest(memory) != before


def test_every_bit_of_a_ragged_extent_counts() -> None:
    memory = noise(LEAF_BYTES + 13, 0)
    seen = {leaf_digest(memory)}
    for bit in [*range(200), *range(8 * LEAF_BYTES - 100, 8 * len(memory))]:
        memory[bit // 8] ^= np.uint8(1 << bit % 8)
        seen.add(leaf_digest(memory))
        memory[bit // 8] ^= np.uint8(1 << bit % 8)
    assert len(seen) == 1 + 200 + 100 + 8 * 13


@given(st.integers(2, 6), seeds, st.data())
def test_swapped_leaves_change_the_digest(leaves: int, seed: int, data: st.DataObject) -> None:
    memory = noise(leaves * LEAF_BYTES, seed)
    first, second = data.draw(st.lists(st.integers(0, leaves - 1), min_size=2, max_size=2, unique=True))
    swapped = memory.reshape(leaves, LEAF_BYTES).copy()
    swapped[[first, second]] = swapped[[second, first]]
    assert leaf_digest(swapped.reshape(-1)) != leaf_digest(memory)


@given(sizes, seeds, st.data())
def test_swapped_words_change_the_digest(size: int, seed: int, data: st.DataObject) -> None:
    words = noise(size + 16 - size % 8, seed).view("<u8").copy()
    before = leaf_digest(words.view(np.uint8))
    first, second = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    assume(words[first] != words[second])
    words[[first, second]] = words[[second, first]]
    assert leaf_digest(words.view(np.uint8)) != before


@given(sizes, st.integers(1, 2 * LEAF_BYTES), st.sampled_from([0, 0xFF]))
def test_truncation_and_growth_of_constant_bytes_change_the_digest(size: int, more: int, fill: int) -> None:
    longer = np.full(size + more, fill, np.uint8)
    assert leaf_digest(longer[:size]) != leaf_digest(longer)


@pytest.mark.parametrize("memory", [np.zeros(0, np.uint8), np.zeros((2, 2), np.uint8), np.zeros(8, np.int64)])
def test_what_is_no_run_of_bytes_has_no_digest(memory: NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="digest is of bytes"):
        leaf_digest(memory)


def test_kernels_equal_the_reference_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="triton comes with the extras 'dev' and 'gpu'")
    # In a process of its own: triton decides when it is imported whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-m", "kernels.testing.leaf_digest"], check=True, timeout=120, env=environment)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("copy", [False, True])
def test_kernels_compile_ahead_and_move_16_bytes_a_thread(kernels: ModuleType, capability: int, copy: bool) -> None:
    moves = ahead_of_time(kernels._hash_leaves, capability, COPY=copy, UNIT=2)
    assert moves.count("ld.volatile.global.v2.b64") == 2  # 4,096 bytes by 128 threads
    assert moves.count("st.global.v2.b64") == (2 if copy else 0)
    assert "ld.global" in ahead_of_time(kernels._combine_leaves, capability, TURNS=2, LANES=256)


def ahead_of_time(kernel: Callable[..., None], capability: int, **constants: int) -> str:
    """PTX of a kernel for a GPU that need not be here; the machine code is built as well."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else "i32" if name == "stride" else "*i64" for name in names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name] == "*i64"}
    source = ASTSource(kernel, signature, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert built.asm["cubin"]
    return str(built.asm["ptx"])


@pytest.mark.parametrize(
    ("source", "destination", "size", "reason"),
    [
        (4, 0, 8, "multiples of 8"),
        (0, 0, 12, "multiples of 8"),
        (0, 0, 0, "empty"),
        (-8, 0, 8, "before its memory"),
        (64, 0, 8, "leaves its source"),
        (0, 64, 8, "or destination"),
        (2**62, 0, 8, "leaves its source"),
        (0, 0, 2**40, "256 MiB"),
    ],
)
def test_extents_a_kernel_cannot_take_are_refused(
    kernels: ModuleType, source: int, destination: int, size: int, reason: str
) -> None:
    rows = (np.array([value], np.int64) for value in (source, destination, size))
    with pytest.raises(ValueError, match=reason):
        kernels.plan_extents(*rows, 64, 64, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_equal_the_reference_and_find_every_flip_on_a_gpu() -> None:
    check_kernels(torch.device("cuda"))
    assert check_random_flips(torch.device("cuda"), 1_000) == 1_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_digest_is_of_the_bytes_in_the_block_whatever_a_late_writer_does() -> None:
    assert check_late_writer(torch.device("cuda"), 200) > 20, "the writer was never at work during a copy"
