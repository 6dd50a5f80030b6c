"""The contest of engines: what is timed, how ratios come of it, and that a missing peer stops everything at once."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import count
from pathlib import Path

import pytest

from bench import engine as bench_engine
from bench.beside import rows_of
from bench.contest import PEERS, Contender, MissingPeer, compete
from bench.job import Job, Prompts, Timing, measure, prompts, run

JOB = Job("nowhere", 512, (1, 3), 6, 5, 2, 4, 100.0)


def echo(given: Prompts, new: int) -> Prompts:
    return [[prompt[0]] * new for prompt in given]


def test_each_repeat_times_the_whole_and_the_first_token_on_prompts_of_its_own() -> None:
    asked: list[tuple[tuple[int, ...], int]] = []

    def generate(given: Prompts, new: int) -> Prompts:
        asked.append((tuple(given[0]), new))
        return echo(given, new)

    ticks = count()
    single, several = measure(JOB, generate, clock=lambda: float(next(ticks)))
    assert (single.batch, several.batch) == (1, 3)
    assert single.whole_s == single.first_s == (1.0,) * 4
    assert len(several.tokens) == 3 and len(several.tokens[0]) == JOB.new
    assert [new for _, new in asked[:3]] == [4, JOB.new, 1]
    assert len({prompt for prompt, _ in asked[:9]}) == 5  # the warm-up's and four repeats'


def test_no_repeat_begins_after_the_time_is_over_but_one_always_runs() -> None:
    ticks = count(step=60)
    job = Job(**{**asdict(JOB), "seconds": 1.0})
    assert all(len(timing.whole_s) == 1 for timing in measure(job, echo, clock=lambda: float(next(ticks))))


def test_a_continuation_of_another_length_is_refused() -> None:
    with pytest.raises(RuntimeError, match="5 of each were asked for"):
        measure(JOB, lambda given, new: [[1] * min(new, 4) for _ in given])


def test_prompts_have_no_special_token_and_depend_on_the_seed_alone() -> None:
    drawn = prompts(JOB, 3, 1)
    assert drawn == prompts(JOB, 3, 1) != prompts(JOB, 3, 2)
    assert all(64 <= token < JOB.vocabulary for prompt in drawn for token in prompt)


def timing(batch: int, whole_s: float, first_s: float, token: int = 7) -> Timing:
    return Timing(batch, (whole_s,), (first_s,), ((token,),) * batch)


def test_ratios_are_of_the_whole_and_of_decoding_and_both_have_the_bar() -> None:
    rows = {row.name: row for row in rows_of([timing(8, 1.0, 0.5)], {"vllm": [timing(8, 4.0, 3.5)]}, 64)}
    whole, decode = rows["batch 8, whole: engine / vllm"], rows["batch 8, decode: engine / vllm"]
    assert (whole.value, whole.bar, whole.holds) == (4.0, 2.0, True)
    assert (decode.value, decode.bar, decode.holds) == (1.0, 2.0, False)
    assert rows["batch 8, decode: engine"].value == pytest.approx(8 * 63 / 0.5)


def test_a_peer_that_says_something_else_is_a_miss() -> None:
    rows = rows_of([timing(8, 1.0, 0.5)], {"vllm": [timing(8, 4.0, 2.0, token=8)]}, 64)
    assert [row.name for row in rows if not row.holds] == ["batch 8: first tokens like vllm's"]


def test_a_missing_peer_names_the_command_that_builds_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PEERS, "vllm", Contender("vllm", "bench.run_vllm", Path("/nowhere/python"), "make peers"))
    assert bench_engine.main(["--family", "v3", "--peer", "vllm"]) == 2
    assert "make peers" in capsys.readouterr().err
    with pytest.raises(MissingPeer):
        compete(PEERS["vllm"], JOB)


def test_a_peer_without_a_family_is_refused() -> None:
    with pytest.raises(SystemExit):
        bench_engine.main(["--peer", "vllm"])


def test_a_contender_reads_its_job_and_leaves_its_timings(tmp_path: Path) -> None:
    given, results = tmp_path / "job.json", tmp_path / "results.json"
    given.write_text(json.dumps(asdict(JOB)), encoding="utf-8")
    assert run(lambda job: echo if job == JOB else pytest.fail("another job"), [str(given), str(results)]) == 0
    assert [one["batch"] for one in json.loads(results.read_text(encoding="utf-8"))] == [1, 3]
