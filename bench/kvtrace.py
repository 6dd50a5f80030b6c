"""Replays requests against the kvstore's eviction policy: token hits beside other caches, Belady's and no limit at all.

`python -m bench.kvtrace --trace PATH` (Mooncake's format) or `--agent`; `--json PATH` writes the figures too. The
first half of a trace warms the caches (the policy's parameters were chosen on it), the second half is measured. With
`--service` a piece of either goes through a real kvstore process with real bytes (`bench/kvtrace_service.py`). The row
of DRAM over NVMe is the store's own `Tiers` and `NvmeTier`; `--admission` shows them also with DRAM's admission asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.arguments import Parser, existing_file, new_file
from bench.kvtrace_caches import Belady, Infinite, Lru, hit_rate
from bench.kvtrace_policy import Policy, TwoTiers
from bench.kvtrace_requests import AgentShape, BadTrace, Request, agent_sessions, read_trace, working_set
from bench.kvtrace_rivals import S3Fifo, WTinyLfu
from bench.kvtrace_service import SMALL_AGENT, add_service_options, service_rows
from bench.kvtrace_speed import speed_rows
from bench.kvtrace_tiers import RealTiers
from bench.table import Row, report

CAPACITIES = (1_000, 3_000, 10_000, 30_000, 50_000)
GAP_AT, GAP_BAR = 10_000, 15.0  # percent of the way from LRU to Belady
TWICE_AT, TWICE_BAR = 3_000, 2.0
DRAM, NVME, TIERS_BAR = 10_000, 100_000, 98.0
AGENT_BAR, AGENT_SHARE_BAR = 95.8, 99.0
CONVERSATION_NAME = "conversation"  # the trace that the bar of twice LRU is set for


@dataclass(frozen=True, slots=True)
class Hits:
    """Percent of prompt tokens hit, by one capacity in blocks."""

    capacity: int
    lru: float
    s3_fifo: float
    w_tiny_lfu: float
    policy: float
    belady: float

    @property
    def closed(self) -> float:
        """Percent of the way from LRU to Belady; 100 where there is none to go."""
        way = self.belady - self.lru
        return 100 * (self.policy - self.lru) / way if way > 1e-9 else 100.0


def main(argv: list[str] | None = None) -> int:
    """Parse, replay, report; exit code 0 if every bar is reached."""
    parser = Parser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=existing_file, help="JSON lines with timestamp, input_length, hash_ids")
    what.add_argument("--agent", action="store_true", help="seeded agent sessions")
    what.add_argument("--speed", action="store_true", help="lookups per second and memory per block alone")
    parser.add_argument("--capacities", type=int, nargs="+", default=list(CAPACITIES), help="in blocks")
    parser.add_argument("--seed", type=int, default=0, help="of the agent sessions")
    parser.add_argument("--admission", action="store_true", help="also the tiers with DRAM's admission asked")
    parser.add_argument("--json", type=new_file, help="also write the table here")
    add_service_options(parser)
    options = parser.parse_args(argv)
    if min(options.capacities) < 1:
        parser.error("argument --capacities: at least one block each")
    if options.speed:
        return report("index and policy", speed_rows(), options.json)
    if options.agent and not options.service:
        return report("agent sessions, percent of prompt tokens", agent_rows(AgentShape(), options.seed), options.json)
    try:
        requests = agent_sessions(SMALL_AGENT, options.seed) if options.agent else read_trace(options.trace)
    except (BadTrace, OSError) as error:
        parser.error(f"argument --trace: {error}")
    if options.service:
        name = "agent sessions" if options.agent else options.trace.name
        return report(f"{name} through a kvstore", service_rows(requests, options), options.json)
    rows = trace_rows(requests, options.capacities, CONVERSATION_NAME in options.trace.name, options.admission)
    return report(f"{options.trace.name}, second half, percent of prompt tokens", rows, options.json)


def trace_rows(
    requests: Sequence[Request], capacities: Sequence[int], conversation: bool, admission: bool
) -> list[Row]:
    """Replays at every capacity, prints the figures side by side and returns them with their bars."""
    half = len(requests) // 2
    infinite = hit_rate(Infinite(), requests, half)
    hits = [replay(requests, capacity, half) for capacity in capacities]
    side_by_side(hits, infinite)
    rows = [row for hit in hits for row in _bars(hit, conversation)]
    orders = 100 * hit_rate(TwoTiers(DRAM, NVME), requests, half) / infinite
    rows += [Row(f"orders of DRAM {DRAM} over NVMe {NVME}, of the infinite cache", orders, "%")]
    rows += tier_rows(requests, half, infinite)
    return rows + (tier_rows(requests, half, infinite, asks_dram=True) if admission else [])


def tier_rows(requests: Sequence[Request], half: int, infinite: float, asks_dram: bool = False) -> list[Row]:
    """The store's own tiers: their hits, how many of them DRAM had, and what they wrote per block that came."""
    with RealTiers(DRAM, NVME, asks_dram) as tiers:
        share = 100 * hit_rate(tiers, requests, half) / infinite
        warm, counts = 100 * tiers.counts.warm / max(tiers.counts.hit, 1), tiers.nvme.counts
    of = f"DRAM {DRAM} over NVMe {NVME}" + (", DRAM's admission asked" if asks_dram else "")
    return [
        Row(f"{of}, of the infinite cache", share, "%", None if asks_dram else TIERS_BAR, ">="),
        Row(f"{of}: blocks of hits that were in DRAM", warm, "%"),
        Row(f"{of}: writes per block written", 1 + counts.moved / max(counts.written, 1), "x"),
    ]


def replay(requests: Sequence[Request], capacity: int, half: int) -> Hits:
    """All caches of one capacity, one after the other."""
    return Hits(
        capacity,
        hit_rate(Lru(capacity), requests, half),
        hit_rate(S3Fifo(capacity), requests, half),
        hit_rate(WTinyLfu(capacity), requests, half),
        hit_rate(Policy(capacity), requests, half),
        hit_rate(Belady(capacity, requests), requests, half),
    )


def agent_rows(shape: AgentShape, seed: int) -> list[Row]:
    """Agent sessions with room for all blocks that will be used again."""
    requests = agent_sessions(shape, seed)
    room = working_set(requests)
    infinite, hits = hit_rate(Infinite(), requests), replay(requests, room, 0)
    side_by_side([hits], infinite)
    ideal = 100 * shape.ideal
    return [
        Row("ideal, counted in tokens", ideal, "%"),
        Row(f"LRU at {room} blocks", hits.lru, "%"),
        Row(f"S3-FIFO at {room} blocks", hits.s3_fifo, "%"),
        Row(f"W-TinyLFU at {room} blocks", hits.w_tiny_lfu, "%"),
        Row(f"policy at {room} blocks", hits.policy, "%", AGENT_BAR, ">="),
        Row("policy, of the ideal", 100 * hits.policy / ideal, "%", AGENT_SHARE_BAR, ">="),
    ]


def side_by_side(hits: Sequence[Hits], infinite: float) -> None:
    """Prints the policy between the caches of the field, Belady and the infinite cache for each capacity."""
    table = Table("blocks", "LRU", "S3-FIFO", "W-TinyLFU", "policy", "Belady", "infinite", "of the gap closed")
    for hit in hits:
        figures = (hit.lru, hit.s3_fifo, hit.w_tiny_lfu, hit.policy, hit.belady, infinite)
        table.add_row(str(hit.capacity), *(f"{figure:.2f}" for figure in figures), f"{hit.closed:.1f} %")
    Console().print(table)


def _bars(hit: Hits, conversation: bool) -> list[Row]:
    at = f"at {hit.capacity} blocks"
    rows = [
        Row(f"LRU {at}", hit.lru, "%"),
        Row(f"S3-FIFO {at}", hit.s3_fifo, "%"),
        Row(f"W-TinyLFU {at}", hit.w_tiny_lfu, "%"),
        Row(f"policy {at}, never below LRU", hit.policy, "%", hit.lru, ">="),
        Row(f"Belady {at}", hit.belady, "%"),
    ]
    if hit.capacity == TWICE_AT and conversation:
        rows.append(Row(f"policy over LRU {at}", hit.policy / hit.lru, "x", TWICE_BAR, ">="))
    if hit.capacity == GAP_AT:
        rows.append(Row(f"gap between LRU and Belady closed {at}", hit.closed, "%", GAP_BAR, ">="))
    return rows


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # destructors of UCX's wheel may crash after the last line
