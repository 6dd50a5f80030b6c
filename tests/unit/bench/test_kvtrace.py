"""The replay counts hits as the definition says, refuses what is no trace, and tells a missed bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.kvtrace import Hits, main
from bench.kvtrace_caches import Belady, Cache, Infinite, Lru, hit_rate
from bench.kvtrace_policy import Policy, TwoTiers
from bench.kvtrace_requests import AgentShape, BadTrace, Request, agent_sessions, read_trace, working_set

SMALL = AgentShape(sessions=4, common_tokens=2048, first_tokens=1024, turns=5, input_tokens=300, output_tokens=100)


def request(time_s: float, *blocks: int, tokens: int | None = None) -> Request:
    return Request(time_s, tokens or 512 * len(blocks), blocks, blocks, 512)


def test_a_hit_is_the_longest_held_prefix_in_tokens() -> None:
    requests = [request(0, 1, 2, 3), request(1, 1, 2, 9), request(2, 1, 8, 3, tokens=1300)]
    assert hit_rate(Infinite(), requests) == pytest.approx(100 * (1024 + 512) / (1536 + 1536 + 1300))


@pytest.mark.parametrize("cache", [Infinite(), Lru(3), Policy(3), TwoTiers(1, 3)])
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
    assert max(hit_rate(Lru(room), requests), hit_rate(Policy(room), requests)) <= belady + 1e-9
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
    assert Hits(10, lru=20.0, policy=25.0, belady=40.0).closed == 25.0
    assert Hits(10, lru=20.0, policy=20.0, belady=20.0).closed == 100.0
