"""The replay counts hits as the definition says, refuses what is no trace, and tells a missed bar."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kvtrace import Hits, main
from bench.kvtrace_caches import Belady, Cache, Infinite, Lru, hit_rate
from bench.kvtrace_policy import Policy, TwoTiers
from bench.kvtrace_requests import AgentShape, BadTrace, Request, agent_sessions, read_trace, working_set
from bench.kvtrace_rivals import S3Fifo, Sketch, WTinyLfu
from bench.kvtrace_tiers import SEGMENT_BLOCKS, RealTiers

SMALL = AgentShape(sessions=4, common_tokens=2048, first_tokens=1024, turns=5, input_tokens=300, output_tokens=100)


def request(time_s: float, *blocks: int, tokens: int | None = None) -> Request:
    return Request(time_s, tokens or 512 * len(blocks), blocks, blocks, 512)


def test_a_hit_is_the_longest_held_prefix_in_tokens() -> None:
    requests = [request(0, 1, 2, 3), request(1, 1, 2, 9), request(2, 1, 8, 3, tokens=1300)]
    assert hit_rate(Infinite(), requests) == pytest.approx(100 * (1024 + 512) / (1536 + 1536 + 1300))


@pytest.mark.parametrize("cache", [Infinite(), Lru(3), S3Fifo(3), WTinyLfu(3), Policy(3), TwoTiers(1, 3)])
def test_a_repeated_prompt_that_fits_hits_whole(cache: Cache) -> None:
    assert hit_rate(cache, [request(0, 1, 2, 3), request(1, 1, 2, 3)], measured_from=1) == 100.0


def test_belady_keeps_what_comes_back_where_lru_keeps_what_came_last() -> None:
    requests = [request(0, 1), request(1, 2), request(2, 3), request(3, 1)]
    assert hit_rate(Lru(1), requests) == 0.0
    assert hit_rate(Belady(1, requests), requests) == 25.0


def test_no_cache_beats_belady_nor_belady_no_limit() -> None:
    requests = agent_sessions(SMALL, seed=3)
    room = working_set(requests) // 2
    belady = hit_rate(Belady(room, requests), requests)
    for cache in (Lru(room), S3Fifo(room), WTinyLfu(room), Policy(room)):
        assert hit_rate(cache, requests) <= belady + 1e-9
    assert belady <= hit_rate(Infinite(), requests)


def test_room_for_the_working_set_loses_no_hit_to_belady() -> None:
    requests = agent_sessions(SMALL, seed=1)
    room = working_set(requests)
    assert hit_rate(Belady(room, requests), requests) == pytest.approx(hit_rate(Infinite(), requests))


def test_the_ideal_of_the_default_agent_sessions_is_the_published_one() -> None:
    assert round(100 * AgentShape().ideal, 1) == 96.8


def test_equal_seeds_give_equal_sessions_in_time_order() -> None:
    requests = agent_sessions(SMALL, seed=7)
    assert requests == agent_sessions(SMALL, seed=7) != agent_sessions(SMALL, seed=8)
    assert [r.time_s for r in requests] == sorted(r.time_s for r in requests)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{}\n{}\n", ":1: KeyError"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": []}\n', "without blocks"),
        ('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n', "fewer than two"),
        (
            '{"timestamp": 9, "input_length": 5, "hash_ids": [1]}\n'
            '{"timestamp": 1, "input_length": 5, "hash_ids": [1]}\n',
            ":2: timestamp is before",
        ),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BadTrace, match=told):
        read_trace(path)


def test_a_missed_bar_is_exit_code_1(tmp_path: Path) -> None:
    lines = [{"timestamp": 1000 * n, "input_length": 512, "hash_ids": [n % 40]} for n in range(400)]
    path, out = tmp_path / "conversation.jsonl", tmp_path / "out.json"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert main(["--trace", str(path), "--capacities", "50", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["passed"] is True
    assert main(["--trace", str(path), "--capacities", "3000"]) == 1  # twice LRU cannot be where LRU hits all


def test_the_gap_closed_is_the_way_from_lru_to_belady() -> None:
    assert Hits(10, lru=20.0, s3_fifo=1.0, w_tiny_lfu=2.0, policy=25.0, belady=40.0).closed == 25.0
    assert Hits(10, lru=20.0, s3_fifo=1.0, w_tiny_lfu=2.0, policy=20.0, belady=20.0).closed == 100.0


@pytest.mark.parametrize("kind", [S3Fifo, WTinyLfu])
def test_what_was_used_often_survives_a_scan_that_lru_does_not(kind: type[S3Fifo] | type[WTinyLfu]) -> None:
    hot = [request(n, 1, 2, 3) for n in range(6)]
    scan = [request(10 + n, 100 + n) for n in range(40)]
    for cache, hit in ((kind(20), 3), (Lru(20), 0)):
        for each in hot + scan:
            cache.serve(each)
        assert cache.serve(request(99, 1, 2, 3)) == hit


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True), max_size=60), st.integers(2, 12))
def test_rivals_hold_no_more_than_their_room(prompts: list[list[int]], room: int) -> None:
    fifo, lfu = S3Fifo(room), WTinyLfu(room)
    for time_s, prompt in enumerate(prompts):
        fifo.serve(request(time_s, *prompt))
        lfu.serve(request(time_s, *prompt))
    assert len(fifo._uses) == len(fifo._small) + len(fifo._main) <= room
    assert len(lfu._window) + len(lfu._probation) + len(lfu._protected) <= room


def test_a_sketch_counts_no_use_too_few_until_it_forgets_half() -> None:
    sketch = Sketch(100)
    for block in range(200):
        for _ in range(block % 5):
            sketch.add(block)
    assert all(sketch.count(block) >= block % 5 for block in range(200))
    for _ in range(10 * 100 - 400):
        sketch.add(1000)
    assert sketch.count(1000) == 7 and sketch.count(4) == 2


def test_real_tiers_hit_what_fits_on_disk_and_lose_what_does_not() -> None:
    prompts = [request(10.0 * n, *range(20 * n, 20 * n + 20)) for n in range(20)]
    with RealTiers(30, 1000) as tiers:
        assert [tiers.serve(each) for each in prompts] == [0] * 20
        again = [replace(each, time_s=each.time_s + 1000) for each in prompts]
        assert [tiers.serve(each) for each in again] == [20] * 20
        assert tiers.counts.hit == 400 and tiers.nvme.counts.moved == 0
    with RealTiers(30, 2 * SEGMENT_BLOCKS) as tiers:
        for each in prompts:
            tiers.serve(each)
        assert tiers.nvme.counts.removed > 0 and len(tiers.nvme) <= 3 * SEGMENT_BLOCKS


def test_what_drams_admission_refuses_is_not_stored_at_all_where_it_is_asked() -> None:
    hot = [request(n, *range(30)) for n in range(20)]
    scan = [request(100 + n, *range(100 + 10 * n, 110 + 10 * n)) for n in range(20)]
    held = []
    for asks in (False, True):
        with RealTiers(30, 1000, asks) as tiers:
            for each in hot + scan:
                tiers.serve(each)
            held.append(len(tiers.nvme))
    assert held[0] == 230 > held[1]
