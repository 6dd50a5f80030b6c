"""One layer of V4 and of V4.1 over its caches on one GPU, by what they hold: `python -m bench.window_caches`.

Rows in bf16 and published records, the cuda kernels' own operators for each: a batch's rows and entries cached, the
best entries chosen, and window and entries attended. Each part is timed as one CUDA graph; random operands, the L2
overwritten before each run, medians.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.arguments import Parser, new_file
from bench.kernels_timing import median_us
from bench.kv_caches import replayed
from bench.table import Row, report
from kernels import choose
from kernels.csa2 import ChoiceSpec, csa2_ops
from kernels.operands import (
    AttentionSpec,
    CompressorSpec,
    IndexerSpec,
    IndexMixing,
    Pages,
    Ragged,
    Ring,
    RopeTable,
    Selection,
)
from kernels.ops import Ops
from kernels.testing.generator import ragged_of
from kernels.testing.window_records import V4, V41, Family

PAGE, RATE, WINDOW, ROOM, HEADS, INDEX_HEADS, CHOSEN = 128, 4, 128, 8, 64, 64, 512
WIDTH, KEY = 512, 128
FAMILIES = {"V4": V4, "V4.1": V41}
CASES = {"decode 128 x 32,768": ((32_767, 1),) * 128, "decode 4 x 131,072": ((131_071, 1),) * 4,
         "chunk of 512 behind 32,256": ((32_256, 512),)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """A batch, what is cached of it, and the operands of one layer."""

    rows: Ragged
    ring: Ring
    entries: Pages
    keys: Pages
    spec: AttentionSpec
    compressor: CompressorSpec
    index_compressor: CompressorSpec
    indexer: IndexerSpec
    open_rows: tuple[Ring, Ring]
    rope: RopeTable
    projected: Tensor
    queries: Tensor
    fresh: Tensor


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, report."""
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="also write the table here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    rows = list(measured())
    return report(f"one layer of V4 and of V4.1 on {torch.cuda.get_device_name()}", rows, options.json)


def measured() -> Iterator[Row]:
    """For each family and batch what either cache takes, and how many times as fast records are."""
    for family, sizes in FAMILIES.items():
        for name, spans in CASES.items():
            total = {}
            for kind in ("rows", "records"):
                ops = choose("cuda", "cuda", records=kind == "records")
                taken = timed(ops, family, made(sizes if kind == "records" else None, spans))
                for part, us in taken.items():
                    print(f"{family}, {name}, {kind}: {part} {us:.1f} us", flush=True)  # a run cut short has told
                    yield Row(f"{family}, {name}, {kind}: {part}", us, "us")
                total[kind] = sum(taken.values())
                torch.cuda.empty_cache()
            yield Row(f"{family}, {name}: records are faster by", total["rows"] / total["records"], "times")


def timed(ops: Ops, family: str, layer: Layer) -> dict[str, float]:
    """Median microseconds of each part."""
    store, choice = (_v4 if family == "V4" else _v41)(ops, layer)
    selection = choice()

    def attend() -> Tensor:
        operands = (layer.spec, layer.rows, layer.ring, layer.entries, selection, layer.rope)
        return ops.attend(layer.queries, layer.fresh, *operands)

    works: dict[str, Callable[[], object]] = {"cached": store, "chosen": choice, "attended": attend}
    return {name: median_us(replayed(work), rounds=12) for name, work in works.items()}


def _v4(ops: Ops, layer: Layer) -> tuple[Callable[[], None], Callable[[], Selection]]:
    rows, rope = layer.rows, layer.rope

    def store() -> None:
        ops.store_rows(layer.fresh, 0, rows, layer.ring)
        ops.compress(layer.projected, layer.compressor, rows, layer.open_rows[0], layer.entries, rope)
        ops.compress(layer.projected, layer.index_compressor, rows, layer.open_rows[1], layer.keys, rope)

    def choice() -> Selection:
        return ops.index_topk(layer.queries, layer.projected, layer.indexer, rows, layer.keys, rope)

    return store, choice


def _v41(ops: Ops, layer: Layer) -> tuple[Callable[[], None], Callable[[], Selection]]:
    csa2, rows, count = csa2_ops(ops.name), layer.rows, len(layer.rows.windows[RATE].window)
    latents, keys = layer.projected[:1].repeat(count, 1)[:, :WIDTH].contiguous(), layer.projected[:count, :KEY]
    keys = keys[:1].repeat(count, 1).contiguous()
    asked = layer.queries[:, : INDEX_HEADS * KEY].contiguous()
    weights = layer.projected[:, :INDEX_HEADS].contiguous()
    spec = ChoiceSpec(INDEX_HEADS, KEY, CHOSEN, 0, 8)

    def store() -> None:
        ops.store_rows(layer.fresh, 0, rows, layer.ring)
        csa2.store_entries(latents, rows, layer.entries)
        csa2.store_entries(keys, rows, layer.keys)

    def choice() -> Selection:
        return csa2.choose(asked, weights, spec, rows, layer.keys, None)[0]

    return store, choice


def made(family: Family | None, spans: tuple[tuple[int, int], ...]) -> Layer:
    """Random operands and caches: records of `family`, or rows."""
    rows, draw = ragged_of(spans, PAGE, (RATE,)), torch.Generator("cuda").manual_seed(0)
    last = max(context + new for context, new in spans)
    angles = torch.rand(last, 32, generator=draw, device="cuda")

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda")

    mixing = IndexMixing(torch.linalg.qr(random(KEY, KEY))[0].contiguous(), False) if family == V4 else None
    compressors = [
        CompressorSpec(0, RATE, width, True, random(RATE, 2 * width), random(width).abs(), 1e-6, mixed)
        for width, mixed in ((WIDTH, None), (KEY, mixing))
    ]
    open_rows = [
        Ring(random(len(spans), 2 * RATE * spec.row_width), None, 0, 2 * RATE, spec.row_width) for spec in compressors
    ]
    entries, keys, ring = (_plain if family is None else _packed)(
        family, int(rows.tables.max()) + 1, len(spans), random
    )
    return Layer(
        rows, ring, entries, keys, AttentionSpec(HEADS, WIDTH, WINDOW, random(HEADS), 1e-6), *compressors,
        IndexerSpec(0, 4 * WIDTH, INDEX_HEADS, KEY, CHOSEN, mixing), (open_rows[0], open_rows[1]),
        RopeTable(angles.cos(), angles.sin()), random(rows.rows, 4 * WIDTH + INDEX_HEADS),
        random(rows.rows, HEADS * WIDTH), _fresh(family, random(rows.rows, WIDTH)),
    )  # fmt: skip


def _fresh(family: Family | None, rows: Tensor) -> Tensor:
    return rows.bfloat16() if family is None else rows


def _plain(_family: Family | None, blocks: int, slots: int, random: Callable[..., Tensor]) -> tuple[Pages, Pages, Ring]:
    count, held = PAGE // RATE, WINDOW + ROOM
    entries, keys = (
        Pages(random(blocks, count * width).bfloat16(), None, 0, count, width, RATE) for width in (WIDTH, KEY)
    )
    return entries, keys, Ring(random(slots, held * WIDTH).bfloat16(), None, 0, held, WIDTH)


def _packed(family: Family | None, blocks: int, slots: int, random: Callable[..., Tensor]) -> tuple[Pages, Pages, Ring]:
    """Bytes below E4M3's NaN and scales near one: what they say matters to nobody."""
    assert family is not None  # noqa: S101  narrows the type
    count, held = PAGE // RATE, WINDOW + ROOM
    entries = Pages(_bytes(blocks, count * family.entry[0], 120), None, 0, count, family.entry[0], RATE)
    keys = Pages(_bytes(blocks, count * family.key[0], 120), None, 0, count, family.key[0], RATE)
    ring = Ring(_bytes(slots, held * family.row[0], 120), None, 0, held, family.row[0])
    if family.key[1]:
        entries = _with_scales(entries, count, family)
        keys = replace(keys, scales=Pages(random(blocks, count).abs(), None, 0, count, 1, RATE))
        whole = torch.cat([ring.storage, _bytes(slots, held * family.row[1], 127)], 1)
        ring = replace(ring, storage=whole, scales=Ring(whole, None, held * family.row[0], held, family.row[1]))
    return entries, keys, ring


def _with_scales(entries: Pages, count: int, family: Family) -> Pages:
    whole = torch.cat([entries.storage, _bytes(len(entries.storage), count * family.entry[1], 127)], 1)
    scales = Pages(whole, None, count * family.entry[0], count, family.entry[1], RATE)
    return replace(entries, storage=whole, scales=scales)


def _bytes(rows: int, size: int, most: int) -> Tensor:
    return torch.randint(most - 8, most, (rows, size), dtype=torch.uint8, device="cuda")


if __name__ == "__main__":
    sys.exit(main())
