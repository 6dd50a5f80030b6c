"""What is compiled ahead of time to see that it compiles, and what it takes. Knows the types of every operand here.

`python -m kernels.triton.variants` prints registers, stack and shared memory of every variant; needs no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.dispatch import PLAN_BLOCK
from kernels.reference.cast import CastSpec, Code, Scale
from kernels.reference.kv_record import Packed
from kernels.reference.mhc import parts_of
from kernels.triton import (
    cast,
    dispatch,
    engram,
    kv_record,
    mhc_post,
    mhc_project,
    mhc_sinkhorn,
    rms_norm,
    rope,
    sampling,
    swiglu,
)
from kernels.triton.scaling import constants

CAPABILITIES = (90, 100)
_POINTERS = {
    "*bf16": "x residual block out plains projected y added packed",
    "*fp32": "scales weights weight cosine sine z squares comb logits query key slot_weights",
    "*i32": "positions sequences tables chosen blocks sources counts offsets places targets experts",
    "*i64": "slots recent multipliers primes",
    "*u8": "pages",
    "*i1": "alive",
    "*fp8e4nv": "codes",
    "fp32": "limit eps",
}
_TYPES = {name: kind for kind, names in _POINTERS.items() for name in names.split()}
_SCALES = {Scale.FP32: "*fp32", Scale.E8M0: "*u8", Scale.E4M3: "*fp8e4nv"}


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A kernel with its constants. `types` names operands that differ from the usual; others that no table knows are
    int32. Pointers and strides are multiples of 16."""

    name: str
    kernel: triton.JITFunction
    constants: dict[str, object]
    types: dict[str, str] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one thread: registers and bytes of stack (spills among them); of one program: bytes of shared memory."""

    registers: int
    stack: int
    shared: int


def compile_variant(variant: Variant, capability: int) -> Resources:
    """Machine code for a GPU that need not be here, and what it takes."""
    names = variant.kernel.arg_names
    types = {name: variant.types.get(name, _TYPES.get(name, "i32")) for name in names}
    signature = {name: "constexpr" if name in variant.constants else types[name] for name in names}
    even = [
        name.endswith("stride") or name in ("width", "columns") or signature[name].startswith("*") for name in names
    ]
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(names)) if even[place]}
    source = ASTSource(variant.kernel, signature, variant.constants, aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.cubin"
        code.write_bytes(built.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        told = subprocess.run([tool, "-res-usage", str(code)], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    if found is None:
        raise ValueError(f"no resources of {variant.name} in {told!r}")
    return Resources(int(found[1]), int(found[2]), built.metadata.shared)


def variants() -> Iterator[Variant]:
    """All kernels of this folder's tile operators and of dispatch, as they are launched by default."""
    yield from _casts()
    yield from _norms()
    yield from _mhc()
    yield from _engram()
    yield from _records()
    yield from _dispatch()
    types = {"logits": "*fp32", "tokens": "*i32"}
    types |= dict.fromkeys(("temperature", "top_p", "min_p"), "*fp32") | {"top_k": "*i32"}
    types |= {"seeds": "*i64", "draws": "*i64"}
    yield Variant("sampling", sampling._sample, {"BLOCK": 8192}, types, 32)


def _casts() -> Iterator[Variant]:
    for code, group, scale in ((Code.E4M3, 128, Scale.FP32), (Code.E4M3, 32, Scale.E8M0), (Code.E2M1, 32, Scale.E8M0),
                               (Code.E2M1, 16, Scale.E4M3)):  # fmt: skip
        spec = CastSpec(code, group, scale)
        types = {"scales": _SCALES[scale], "codes": "*fp8e4nv" if code is Code.E4M3 else "*u8"}
        given = {**constants(spec)}
        tile = cast.tiling_for(8192, 7168, code is Code.E2M1)
        shape = {"WIDTH": 7168, "ROWS": tile.rows, "GROUPS": tile.columns // group}
        yield Variant(f"cast {code.name} {group}", cast._cast_rows, {**shape, **given}, types, tile.warps)
        tile = swiglu.tiling_for(8192, 2048)
        shape = {"INNER": 2048, "ROWS": tile.rows, "GROUPS": tile.columns // group, "CLAMPED": True, "WEIGHTED": True}
        yield Variant(f"swiglu {code.name} {group}", swiglu._swiglu_cast, {**shape, **given}, types, tile.warps)
    blocks = {"SIZE": 128, "SCALE": 0, "LARGEST": 448.0, "FLOOR": 1e-4}
    yield Variant("cast blocks", cast._cast_blocks, blocks, warps=8)


def _norms() -> Iterator[Variant]:
    spec = CastSpec(Code.E4M3, 32, Scale.FP32)
    given = {**constants(spec)}
    for width in (512, 7168):
        for added, casts in ((False, False), (False, True), (True, True)):
            turns = rms_norm.turns_for(8192, width, added)
            shape = {"WIDTH": width, "ADDED": added, "CAST": casts, "AHEAD": turns.ahead, "TURNS": bool(turns.programs),
                     "GROUPS": triton.next_power_of_2(width // 32)}  # fmt: skip
            types = {"out": "*fp8e4nv"} if casts else {"scales": "*bf16"}
            name = f"norm {width}{', added' if added else ''}{', cast' if casts else ''}"
            yield Variant(name, rms_norm._norm, {**shape, **given}, types, turns.warps)
    tile = rope.tiling_for(128, 64)
    turning = {"WIDTH": 64, "PAIRS": 32, "HEADS": tile.heads, "INVERSE": False}
    yield Variant("rope", rope._rope, turning, warps=tile.warps)
    for casts in (False, True):
        tile = rope.tiling_for(64, 512)
        shape = {"WIDTH": 512, "PAIRS": 32, "HEADS": tile.heads, "WEIGHTED": True, "CAST": casts}
        types = {"out": "*fp8e4nv"} if casts else {"scales": "*bf16"}
        yield Variant(f"norm and rope, cast {casts}", rope._norm_rope, {**shape, **given}, types, tile.warps)


def _mhc() -> Iterator[Variant]:
    for rows in (128, 4096):
        tile, parts = mhc_project.tiling_for(rows), parts_of(28_672)
        shape = {"WIDTH": 28_672, "PARTS": parts, "ROWS": tile.rows, "STEP": tile.columns, "COLUMNS": 24, "PADDED": 32,
                 "AHEAD": tile.steps}  # fmt: skip
        yield Variant(f"project {rows}", mhc_project._project, shape, {}, tile.warps)
    yield Variant("sinkhorn", mhc_sinkhorn._sinkhorn, {"ITERATIONS": 20, "ROWS": 32}, warps=1)
    yield Variant("post", mhc_post._post, {"HIDDEN": 7168, "BLOCK": 1024})


def _engram() -> Iterator[Variant]:
    turns = engram.turns_for(8192)
    gate = {"STREAMS": 4, "HIDDEN": 4096, "BLOCK": 4096, "AHEAD": turns.ahead, "TURNS": bool(turns.programs)}
    yield Variant("engram gate", engram._gate, gate, warps=turns.warps)
    types = {"rows": "*i64", "offsets": "*i64", "scales": "*u8"}
    yield Variant("engram hash", engram._hash, {"LONGEST": 4, "COLUMNS": 24, "PADDED": 32, "TOKENS": 16}, types)
    yield Variant("engram gather", engram._gather, {"WIDTH": 256, "TOGETHER": 16}, types)


def _records() -> Iterator[Variant]:
    for kind in Packed:
        layout = kind.value
        rows = 1 if layout.width == 512 else 4
        shape = {"ROWS": rows, "WIDTH": min(layout.width, 512), "CAST": layout.cast, "ROW": layout.row, "NORMED": True,
                 "SCALE_BYTES": layout.scale_bytes, "SCALE_AT": -1 if layout.scale_at is None else layout.scale_at,
                 "PLAIN": layout.plain, "PLAIN_AT": layout.plain_at, "APART": layout.width > 512, "PAIRS": 32,
                 **constants(layout.spec)}  # fmt: skip
        scales = {"scales": _SCALES[layout.spec.scale]}
        yield Variant(f"record {kind.name}", kv_record._pack, {**shape, "PAGED": False}, scales, rows)
        if kind is Packed.V32:  # as the engine caches it: slots are positions
            of = {**scales, "slots": "*i32"}
            yield Variant(f"record {kind.name}, paged", kv_record._pack, {**shape, "PAGED": True}, of, rows)


def _dispatch() -> Iterator[Variant]:
    count = {"GROUPS": 256, "PADDED": 256, "BLOCK": PLAN_BLOCK, "SHARE": 512}
    yield Variant("plan: count", dispatch._count, count, {"slots": "i32"}, 8)
    yield Variant("plan: scan", dispatch._scan, {"GROUPS": 256, "PADDED": 256, "SCANNED": 32}, warps=8)
    yield Variant("plan: place", dispatch._place, {"BLOCK": PLAN_BLOCK}, warps=8)
    yield Variant("destinations", dispatch._destinations, {"CHOICES": 8, "PADDED": 8, "ROWS": 32})
    yield Variant("copy rows", dispatch._copy_rows, {"BLOCK": 1024}, {"x": "*i32", "out": "*i32"})
    yield Variant("localize", dispatch._localize, {"CHOICES": 8, "PADDED": 8, "SLOTS": 64}, {"slots": "i32"})
    combined = {"HIDDEN": 7168, "CHOICES": 8, "BLOCK": 1024, "WEIGHTED": True, "ADDED": True}
    yield Variant("combine", dispatch._combine, combined)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m kernels.triton.variants", description=__doc__).parse_args()
    for variant in variants():
        for capability in CAPABILITIES:
            print(f"{variant.name}, sm_{capability}: {compile_variant(variant, capability)}", flush=True)
