"""One V3.2 layer over its cache on one GPU, by what the cache holds: `python -m bench.kv_caches`.

Rows in bf16 and published records, the cuda kernels' own operators for each: a token's rows cached, its best keys
chosen, and those attended. Decode is timed as one CUDA graph, a prefill chunk as it is launched; random operands,
the L2 overwritten before each run, medians.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.arguments import Parser, new_file
from bench.engine_gpu import random_records
from bench.kernels_timing import median_us
from bench.table import Row, report
from kernels import choose
from kernels.operands import IndexerSpec, IndexKeySpec, IndexMixing, MlaSpec, Pages, Ragged, RopeTable, Selection
from kernels.ops import Ops
from kernels.reference.records import LATENT_BYTES
from kernels.testing.generator import ragged_of

PAGE, HEADS, INDEX_HEADS, CHOSEN = 64, 128, 64, 2048
COLUMNS = 1536 + 576 + 128 + INDEX_HEADS  # query latent, latent and key, index key, head weights
CASES = {"decode 32 x 32,768": ((32_767, 1),) * 32, "decode 4 x 131,072": ((131_071, 1),) * 4,
         "chunk of 512 behind 32,256": ((32_256, 512),)}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """A batch, what is cached of it, and the operands of one layer."""

    rows: Ragged
    latents: Pages
    keys: Pages
    spec: MlaSpec
    key: IndexKeySpec
    indexer: IndexerSpec
    rope: RopeTable
    projected: Tensor
    queries: Tensor


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, report."""
    parser = Parser(description=__doc__)
    parser.add_argument("--json", type=new_file, help="also write the table here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    rows = list(measured())
    return report(f"one V3.2 layer on {torch.cuda.get_device_name()}", rows, options.json)


def measured() -> Iterator[Row]:
    """For each batch what either cache takes, and how many times as fast records are."""
    for name, spans in CASES.items():
        taken: dict[str, dict[str, float]] = {}
        for kind in ("rows", "records"):
            ops, layer = choose("cuda", "cuda", records=kind == "records"), made(kind == "records", spans)
            taken[kind] = timed(ops, layer, captured=name.startswith("decode"))
            for part, us in taken[kind].items():
                print(f"{name}, {kind}: {part} {us:.1f} us", flush=True)  # a run that is cut short has told
                yield Row(f"{name}, {kind}: {part}", us, "us")
            torch.cuda.empty_cache()
        total = {kind: sum(parts.values()) for kind, parts in taken.items()}
        yield Row(f"{name}: records are faster by", total["rows"] / total["records"], "times")


def timed(ops: Ops, layer: Layer, captured: bool) -> dict[str, float]:
    """Median microseconds of each part."""
    rows, rope = layer.rows, layer.rope
    absorbed, turning = layer.queries[:, : HEADS * 512].contiguous(), layer.queries[:, : HEADS * 64].contiguous()
    selection = ops.index_topk(layer.queries, layer.projected, layer.indexer, rows, layer.keys, rope)

    def store() -> None:
        ops.store_latent(layer.projected, layer.spec, rows, layer.latents, rope)
        ops.store_index_key(layer.projected, layer.key, rows, layer.keys, rope)

    def choose_keys() -> Selection:
        return ops.index_topk(layer.queries, layer.projected, layer.indexer, rows, layer.keys, rope)

    def attend() -> Tensor:
        return ops.attend_latent(absorbed, turning, layer.spec, rows, layer.latents, selection, rope)

    works = {"cached": store, "chosen": choose_keys, "attended": attend}
    return {name: median_us(replayed(work) if captured else work, rounds=12) for name, work in works.items()}


def replayed(work: Callable[[], object]) -> Callable[[], None]:
    """The same as one graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay(_kept: object = kept) -> None:  # what a graph writes lives as long as it
        graph.replay()

    return replay


def made(records: bool, spans: tuple[tuple[int, int], ...]) -> Layer:
    """Random operands and caches."""
    rows, draw = ragged_of(spans, PAGE, ()), torch.Generator("cuda").manual_seed(0)
    blocks, last = int(rows.tables.max()) + 1, max(context + new for context, new in spans)
    angles = torch.rand(last, 32, generator=draw, device="cuda")

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda")

    mixing = IndexMixing(torch.linalg.qr(random(128, 128))[0].contiguous(), False) if records else None
    spec = MlaSpec(
        heads=HEADS, nope=128, rope=64, value=128, rank=512, column=1536, norm=random(512).abs(), norm_eps=1e-6,
        scale=0.05, absorb=None, output=None, expand=None,
    )  # fmt: skip
    latents, keys = (packed if records else plain)(blocks, random)
    return Layer(
        rows, latents, keys, spec, IndexKeySpec(2112, random(128).abs(), random(128), 1e-6, mixing),
        IndexerSpec(0, 2240, INDEX_HEADS, 128, CHOSEN, mixing), RopeTable(angles.cos(), angles.sin()),
        random(rows.rows, COLUMNS), random(rows.rows, HEADS * 512),
    )  # fmt: skip


def plain(blocks: int, random: Callable[..., Tensor]) -> tuple[Pages, Pages]:
    """Latents and index keys in bf16."""
    pages = [Pages(random(blocks, PAGE * width).bfloat16(), None, 0, PAGE, width, 1) for width in (576, 128)]
    return pages[0], pages[1]


def packed(blocks: int, random: Callable[..., Tensor]) -> tuple[Pages, Pages]:
    """Both as records."""
    latents = random_records(blocks * PAGE, torch.Generator("cuda").manual_seed(1)).view(blocks, -1)
    codes = random(blocks, PAGE * 128).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = Pages(random(blocks, PAGE).abs(), None, 0, PAGE, 1, 1)
    keys = Pages(codes, None, 0, PAGE, 128, 1)
    return Pages(latents, None, 0, PAGE, LATENT_BYTES, 1), replace(keys, scales=scales)


if __name__ == "__main__":
    sys.exit(main())
