"""The engine's whole life of a request, over a family that reads everything back from the cache."""

from dataclasses import replace

import pytest

from engine.batch import RaggedBatch
from engine.errors import BadLogits, DuplicateRequest, Exhausted, ForwardFailed, InvalidParameter
from engine.events import Failed, Finished, FirstToken, Preempted, Usage
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams
from engine.stops import FinishReason, StopMatch
from tests.support.driving import GREEDY, of, run, tokens_of, whole
from tests.support.fakefamily import NAN_TOKEN, POISON_TOKEN, fake_engine, letters

PROMPT = tuple(2 + (7 * place) % 50 for place in range(43))
HOT = SamplingParams(temperature=1.5, top_p=0.9, frequency_penalty=0.3, max_tokens=25, ignore_eos=True, seed=11)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 43])
@pytest.mark.parametrize("chunk", [3, 8, 13, 64])
def test_chunking_never_changes_tokens(length: int, chunk: int) -> None:
    prompt = PROMPT[:length]
    alone = whole(fake_engine(max_batch_tokens=4096), prompt, HOT, cache=False)
    assert whole(fake_engine(max_batch_tokens=chunk, max_sequences=2), prompt, HOT) == alone
    assert len(alone) == 25


def test_a_prefix_hit_computes_less_and_gives_the_same_tokens() -> None:
    engine = fake_engine()
    first = whole(engine, PROMPT)
    before = engine.stats()
    engine.submit(GenerateRequest("again", PROMPT, GREEDY))
    events = run(engine)
    after = engine.stats()
    assert tokens_of(events, "again") == first
    (start,) = of(events, FirstToken)
    assert start.cached_tokens == 40 and after.cached_tokens == 40  # the last anchor below 43 tokens
    assert after.computed_tokens - before.computed_tokens == len(PROMPT) - 40 + GREEDY.max_tokens - 1


def test_the_next_turn_hits_the_output_of_this_one() -> None:
    engine = fake_engine()
    output = whole(engine, PROMPT, replace(GREEDY, max_tokens=30))
    turn = (*PROMPT, *output, 9, 9, 9)
    engine.submit(GenerateRequest("turn", turn, GREEDY))
    events = run(engine)
    assert of(events, FirstToken)[0].cached_tokens == (43 + 30 - 1) // 8 * 8
    assert tokens_of(events, "turn") == whole(fake_engine(), turn, cache=False)


def test_another_tenant_and_a_request_without_cache_hit_nothing() -> None:
    engine = fake_engine()
    whole(engine, PROMPT, salt=b"a")
    for fields in ({"salt": b"b"}, {"salt": b"a", "cache": False}):
        engine.submit(GenerateRequest("other", PROMPT, GREEDY, **fields))
        assert of(run(engine), FirstToken)[0].cached_tokens == 0


def test_many_at_once_equal_each_alone_though_blocks_run_out_and_sequences_are_preempted() -> None:
    prompts = [PROMPT[start : start + 5 + 3 * start] for start in range(10)]
    alone = [whole(fake_engine(), prompt, HOT, cache=False) for prompt in prompts]
    engine = fake_engine(num_blocks=13)
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(f"r{index}", prompt, HOT))
    events = run(engine)
    assert [tokens_of(events, f"r{index}") for index in range(10)] == alone
    assert engine.stats().preemptions == len(of(events, Preempted)) > 0
    assert engine.stats().blocks_held == engine.stats().slots_held == 0


def test_slots_bound_how_many_run_and_the_rest_wait() -> None:
    engine = fake_engine(num_slots=2)
    for index in range(5):
        engine.submit(GenerateRequest(f"r{index}", PROMPT[index : index + 9], GREEDY))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 3)
    events = run(engine)
    assert [tokens_of(events, f"r{index}")[-1] for index in range(5)] == [
        whole(fake_engine(), PROMPT[index : index + 9])[-1] for index in range(5)
    ]


def test_nobody_is_admitted_into_the_block_a_running_sequence_needs_next() -> None:
    engine = fake_engine(num_blocks=4)
    engine.submit(GenerateRequest("grows", PROMPT[:9], GREEDY))
    engine.step()
    engine.submit(GenerateRequest("waits", PROMPT[20:35], replace(GREEDY, max_tokens=2)))
    assert len(of(run(engine), Finished)) == 2 and engine.stats().preemptions == 0


def test_a_decode_keeps_only_its_newest_anchor_besides_those_on_the_grid() -> None:
    engine = fake_engine(anchor_every_blocks=3)
    engine.submit(GenerateRequest("long", PROMPT[:20], replace(GREEDY, max_tokens=60)))
    run(engine)
    chain_tokens = (*PROMPT[:20], *whole(fake_engine(), PROMPT[:20], replace(GREEDY, max_tokens=60)))
    hits = [engine.lookup(chain_tokens[:end]).hit_tokens for end in range(17, 80, 8)]
    assert engine.stats().anchors == 4  # 16 from the prompt, 24 and 48 on the grid, 72 the newest
    assert hits == [16, 24, 24, 24, 48, 48, 48, 72]


def test_first_come_is_first_served_and_priority_passes() -> None:
    engine = fake_engine(max_sequences=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 1)):
        engine.submit(GenerateRequest(name, PROMPT[:5], replace(GREEDY, max_tokens=2), priority=priority))
    assert [event.request_id for event in of(run(engine), Finished)] == ["c", "a", "b"]


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    batches: list[RaggedBatch] = []
    engine = fake_engine(spy=batches.append, max_batch_tokens=9)
    engine.submit(GenerateRequest("short", PROMPT[:4], GREEDY))
    engine.step()
    engine.submit(GenerateRequest("long", PROMPT, GREEDY))
    batches.clear()
    while not of(events := engine.step(), FirstToken):
        assert len(tokens_of(events, "short")) == 1, "every step carries the running decode"
    assert [batch.rows for batch in batches] == [9, 9, 9, 9, 9, 4]


def test_usage_stop_and_length() -> None:
    engine = fake_engine()
    tokens = whole(engine, PROMPT, replace(GREEDY, max_tokens=8))
    stop_at = tokens[5]
    engine.submit(GenerateRequest("stop", PROMPT, replace(GREEDY, stop_token_ids=(stop_at,))))
    events = run(engine)
    cut = tokens.index(stop_at) + 1
    assert tokens_of(events, "stop") == tokens[:cut]
    (end,) = of(events, Finished)
    assert (end.reason, end.stop_match) == (FinishReason.STOP, StopMatch(stop_at, None, None))
    assert end.usage == Usage(43, 40, cut)


def test_stop_strings_end_at_the_completing_token() -> None:
    tokens = whole(fake_engine(), PROMPT, replace(GREEDY, max_tokens=8))
    text = letters(tokens)
    engine = fake_engine(decode=letters)
    engine.submit(GenerateRequest("stop", PROMPT, replace(GREEDY, stop=(text[3:6],))))
    events = run(engine)
    start = text.index(text[3:6])
    assert tokens_of(events, "stop") == tokens[: start + 3]
    assert of(events, Finished)[0].stop_match == StopMatch(None, text[3:6], start)


def test_logprobs_of_prompt_and_output_do_not_depend_on_chunks_or_cache() -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1, max_tokens=3)
    seen = []
    engines = [fake_engine(max_batch_tokens=64), fake_engine(max_batch_tokens=9), fake_engine(max_batch_tokens=64)]
    whole(engines[2], PROMPT)
    for engine in engines:
        engine.submit(GenerateRequest("r", PROMPT, params))
        events = run(engine)
        (first,) = of(events, FirstToken)
        assert first.prompt_logprobs[0] is None
        assert [entry.token for entry in first.prompt_logprobs[1:]] == list(PROMPT[1:])
        assert first.logprob.token == first.token == first.logprob.top[0][0]
        seen.append((first.prompt_logprobs, first.logprob, events[-2].logprobs))
    assert seen[0] == seen[1] == seen[2]


def test_a_life_that_continues_another_gives_the_rest_of_it() -> None:
    for sampling in (GREEDY, HOT):
        tokens = whole(fake_engine(), PROMPT, sampling)
        for cut in (1, 5, 11):
            assert whole(fake_engine(), PROMPT, sampling, emitted=tuple(tokens[:cut])) == tokens[cut:]


@pytest.mark.parametrize(
    ("bad", "error", "together"), [(NAN_TOKEN, BadLogits, True), (POISON_TOKEN, ForwardFailed, True)]
)
def test_a_request_that_breaks_the_model_fails_alone(bad: int, error: type, together: bool) -> None:
    prompts = [PROMPT[start : start + 20] for start in range(4)]
    alone = [whole(fake_engine(), prompt, HOT) for prompt in prompts]
    engine = fake_engine()
    for index, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(f"r{index}", prompt, HOT))
        if index == 1:
            engine.submit(GenerateRequest("bad", (*PROMPT[:18], bad), HOT))
    events = run(engine)
    assert [type(event.error) for event in of(events, Failed)] == [error]
    assert of(events, Failed)[0].request_id == "bad"
    assert [tokens_of(events, f"r{index}") for index in range(4)] == alone
    assert engine.stats().failed == 1 and engine.stats().blocks_held == 0


def test_what_a_failed_request_cached_is_never_hit() -> None:
    engine = fake_engine()
    engine.submit(GenerateRequest("bad", (*PROMPT[:18], NAN_TOKEN), GREEDY))
    run(engine)
    assert engine.stats().blocks_cached == 0 and engine.lookup((*PROMPT[:18], 5)).matched_blocks == 0


@pytest.mark.parametrize("steps", range(9))
def test_a_cancel_at_any_step_returns_everything_and_leaves_others_alone(steps: int) -> None:
    engine = fake_engine(max_batch_tokens=9)
    engine.submit(GenerateRequest("gone", PROMPT, GREEDY))
    engine.submit(GenerateRequest("stays", PROMPT[3:], GREEDY))
    events = [event for _ in range(steps) for event in engine.step()]
    engine.cancel("gone")
    engine.cancel("gone")
    rest = run(engine)
    assert [event.reason for event in of(rest, Finished, "gone")] == [FinishReason.CANCELLED]
    assert tokens_of([*events, *rest], "stays") == whole(fake_engine(), PROMPT[3:])
    assert engine.stats().blocks_held == engine.stats().slots_held == 0
    engine.memory.check_idle()


def test_a_released_request_says_nothing_more() -> None:
    engine = fake_engine()
    engine.submit(GenerateRequest("gone", PROMPT, GREEDY))
    engine.step()
    engine.release("gone")
    engine.release("gone")
    assert run(engine) == [] and engine.stats().blocks_held == 0


def test_a_paused_request_waits_and_loses_its_memory_to_one_that_needs_it() -> None:
    engine = fake_engine(num_blocks=7)
    tokens = whole(fake_engine(), PROMPT[:20])
    engine.submit(GenerateRequest("slow", PROMPT[:20], GREEDY))
    events = [*engine.step(), *engine.step(), *engine.step()]
    engine.pause("slow", True)
    assert not engine.has_work
    engine.submit(GenerateRequest("other", PROMPT[:40], GREEDY))
    events += run(engine)
    assert of(events, Preempted, "slow") and of(events, Finished, "other")
    engine.pause("slow", False)
    assert tokens_of([*events, *run(engine)], "slow") == tokens


BAD_REQUESTS = [
    ("prompt", GenerateRequest("r", (), GREEDY)),
    ("prompt", GenerateRequest("r", (64,), GREEDY)),
    ("prompt", GenerateRequest("r", (-1,), GREEDY)),
    ("prompt", GenerateRequest("r", (1.5,), GREEDY)),  # type: ignore[arg-type]
    ("prompt", GenerateRequest("r", (5,) * 512, GREEDY)),
    ("max_tokens", GenerateRequest("r", (5,) * 500, replace(GREEDY, max_tokens=13))),
    ("max_tokens", GenerateRequest("r", (5,), replace(GREEDY, max_tokens=2**31))),
    ("temperature", GenerateRequest("r", (5,), replace(GREEDY, temperature=float("nan")))),
    ("stop", GenerateRequest("r", (5,), replace(GREEDY, stop=("a",)))),  # this engine has no tokenizer
    ("salt", GenerateRequest("r", (5,), GREEDY, salt="text")),  # type: ignore[arg-type]
    ("priority", GenerateRequest("r", (5,), GREEDY, priority=9)),
    ("request_id", GenerateRequest("", (5,), GREEDY)),
    ("emitted", GenerateRequest("r", (5,), GREEDY, emitted=(64,))),
    ("emitted", GenerateRequest("r", (5,), replace(GREEDY, max_tokens=2), emitted=(5, 6))),
]


@pytest.mark.parametrize(
    ("field", "request_"), BAD_REQUESTS, ids=[f"{index}-{bad[0]}" for index, bad in enumerate(BAD_REQUESTS)]
)
def test_a_bad_request_is_refused_by_field_and_leaves_nothing(field: str, request_: GenerateRequest) -> None:
    engine = fake_engine()
    with pytest.raises(InvalidParameter) as refusal:
        engine.submit(request_)
    assert refusal.value.field == field and refusal.value.fix
    assert not engine.has_work
    engine.submit(GenerateRequest("r", (5,), GREEDY))


def test_a_live_id_is_refused_and_a_full_queue_says_so() -> None:
    engine = fake_engine(max_waiting=2)
    engine.submit(GenerateRequest("a", PROMPT, GREEDY))
    with pytest.raises(DuplicateRequest):
        engine.submit(GenerateRequest("a", PROMPT, GREEDY))
    engine.submit(GenerateRequest("b", PROMPT, GREEDY))
    with pytest.raises(Exhausted) as refusal:
        engine.submit(GenerateRequest("c", PROMPT, GREEDY))
    assert refusal.value.resource == "queue places"
    assert len(of(run(engine), Finished)) == 2
