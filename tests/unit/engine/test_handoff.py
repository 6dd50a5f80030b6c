"""Prefill here, decode there: the two lives that meet through a ticket, with bytes copied between two engines."""

from dataclasses import replace

import pytest

from engine.errors import DuplicateRequest, Exhausted, InvalidParameter, NotReserved, UnknownRequest
from engine.events import ChunkDone, Finished, FirstToken, Preempted
from engine.requests import DecodeRequest, GenerateRequest, PrefillRequest
from engine.sampling.params import SamplingParams, SamplingState
from engine.stops import FinishReason
from tests.support.driving import GREEDY, copy_kv, handoff, of, run, tokens_of, whole
from tests.support.fakefamily import fake_engine, letters

PROMPT = tuple(2 + (11 * place) % 53 for place in range(61))
HOT = SamplingParams(temperature=1.2, min_p=0.05, repetition_penalty=1.2, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 24, 43, 61])
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("cache", [True, False])
def test_disaggregated_equals_whole_token_for_token(length: int, sampling: SamplingParams, cache: bool) -> None:
    prompt = PROMPT[:length]
    engine = fake_engine()
    engine.submit(GenerateRequest("r", prompt, sampling))
    alone = tokens_of(run(engine), "r")
    source, target = fake_engine(max_batch_tokens=9), fake_engine()
    first, _ = handoff(source, target, PrefillRequest("r", prompt, sampling, cache=cache))
    events = run(target)
    assert [first.token, *tokens_of(events, "r")] == alone
    assert of(events, Finished)[0].usage.output_tokens == sampling.max_tokens
    for side in (source, target):
        side.memory.check_idle()


def test_wrong_bytes_give_wrong_tokens() -> None:
    """Control for every test that copies: the fake family must notice a single flipped byte of any group."""
    layout = fake_engine().model.layout
    for group in layout.groups:
        source, target = fake_engine(), fake_engine()
        request = PrefillRequest("r", PROMPT, GREEDY, cache=False)
        _, reservation = handoff(source, target, request)
        if group in layout.globals:
            target.pool.block_extent(group.name, reservation.blocks[2])[3] ^= 1
        else:
            target.pool.slot_extent(group.name, reservation.slot)[-3] ^= 1
        assert tokens_of(run(target), "r") != whole(fake_engine(), PROMPT)[1:], group.name


def test_chunks_are_reported_while_they_are_held_and_end_with_the_first_token() -> None:
    engine = fake_engine(max_batch_tokens=9)
    engine.submit_prefill(PrefillRequest("r", PROMPT[:43], GREEDY))
    done: list[int] = []
    while not of(events := engine.step(), FirstToken):
        (chunk,) = events
        assert isinstance(chunk, ChunkDone) and chunk.prompt_tokens == 43
        done.append(chunk.computed_tokens)
        assert engine.held("r").tokens == chunk.computed_tokens
    assert done == [8, 16, 24, 32, 40] and of(events, ChunkDone)[0].computed_tokens == 43
    assert len(engine.held("r").block_table) == 6 and not engine.has_work
    assert engine.stats().held == 1
    engine.release("r")
    with pytest.raises(UnknownRequest):
        engine.held("r")
    engine.memory.check_idle()


def test_a_decode_that_holds_a_verified_prefix_says_so_and_needs_only_the_rest() -> None:
    source, target = fake_engine(), fake_engine()
    handoff(source, target, PrefillRequest("one", PROMPT[:40], GREEDY))
    run(target)
    longer = (*PROMPT[:40], 9, 8, 7, 6, 5)
    first, reservation = handoff(source, target, PrefillRequest("two", longer, GREEDY))
    assert reservation.held_tokens == 40
    assert [first.token, *tokens_of(run(target), "two")] == whole(fake_engine(), longer)


def test_imported_blocks_are_shared_only_after_the_decode_started() -> None:
    target = fake_engine()
    target.reserve("one", 40, 60, b"", PROMPT[:40])
    assert target.reserve("two", 40, 60, b"", PROMPT[:40]).held_tokens == 0, "nothing of `one` was verified yet"


def test_a_preempted_decode_recomputes_to_the_same_tokens() -> None:
    prompts = [PROMPT[start : start + 17] for start in range(5)]
    alone = []
    for index, prompt in enumerate(prompts):
        engine = fake_engine()
        engine.submit(GenerateRequest(f"r{index}", prompt, HOT))
        alone.append(tokens_of(run(engine), f"r{index}"))
    source, target = fake_engine(), fake_engine(num_blocks=16)
    firsts = [handoff(source, target, PrefillRequest(f"r{index}", prompt, HOT)) for index, prompt in enumerate(prompts)]
    events = run(target)
    assert of(events, Preempted), "sixteen blocks must be too few for five sequences of 37 tokens"
    assert [[first.token, *tokens_of(events, f"r{index}")] for index, (first, _) in enumerate(firsts)] == alone
    target.memory.check_idle()


def test_a_migrated_stream_goes_on_exactly_where_it_was() -> None:
    engine = fake_engine()
    engine.submit(GenerateRequest("r", PROMPT, HOT))
    alone = tokens_of(run(engine), "r")
    first, _ = handoff(fake_engine(), target := fake_engine(), PrefillRequest("r", PROMPT, HOT))
    sent = [first.token, *tokens_of([event for _ in range(6) for event in target.step()], "r")]
    again, _ = handoff(fake_engine(), other := fake_engine(), PrefillRequest("r", PROMPT, HOT, emitted=tuple(sent)))
    assert again.state.emitted == len(sent) + 1
    assert [*sent, again.token, *tokens_of(run(other), "r")] == alone


def test_a_first_token_that_ends_the_request_is_marked_and_decode_finishes_at_once() -> None:
    source, target = fake_engine(decode=letters), fake_engine(decode=letters)
    for sampling, reason in (
        (replace(GREEDY, max_tokens=1), FinishReason.LENGTH),
        (replace(GREEDY, stop_token_ids=(whole(fake_engine(), PROMPT)[0],)), FinishReason.STOP),
        (replace(GREEDY, stop=(letters(whole(fake_engine(), PROMPT)[:1]),)), FinishReason.STOP),
    ):
        source.submit_prefill(PrefillRequest("r", PROMPT, sampling))
        (first,) = of(run(source), FirstToken)
        assert first.stop is not None and first.stop.reason is reason
        reservation = target.reserve("r", len(PROMPT), len(PROMPT) + 12)
        copy_kv(source, target, "r", reservation)
        source.release("r")
        target.start_decode(DecodeRequest("r", PROMPT, (first.token,), sampling, first.state))
        (end,) = run(target)
        assert isinstance(end, Finished) and end.reason is reason and end.usage.output_tokens == 1


def test_reservations_are_refused_clearly_and_take_nothing() -> None:
    engine = fake_engine(num_blocks=8, max_sequences=2)
    for field, args in (
        ("prompt_tokens", ("r", 0, 10)),
        ("max_total_tokens", ("r", 10, 10)),
        ("max_total_tokens", ("r", 10, 65)),
        ("prompt", ("r", 10, 20, b"", PROMPT[:9])),
    ):
        with pytest.raises(InvalidParameter) as refusal:
            engine.reserve(*args)
        assert refusal.value.field == field
    engine.reserve("r", 50, 60)
    with pytest.raises(DuplicateRequest):
        engine.reserve("r", 1, 2)
    with pytest.raises(Exhausted) as shortage:
        engine.reserve("other", 10, 20)
    assert (shortage.value.resource, shortage.value.needed, shortage.value.free) == ("kv blocks", 2, 1)
    engine.reserve("small", 8, 20)
    with pytest.raises(Exhausted) as shortage:
        engine.reserve("third", 1, 2)
    assert shortage.value.resource == "sequences"
    for name in ("r", "small", "never"):
        engine.release(name)
        engine.release(name)
    engine.memory.check_idle()


def test_decode_starts_only_from_its_own_reservation() -> None:
    engine = fake_engine()
    request = DecodeRequest("r", PROMPT, (5,), GREEDY, SamplingState(0, 1))
    with pytest.raises(NotReserved):
        engine.start_decode(request)
    engine.reserve("r", len(PROMPT), 100, b"", PROMPT)
    for wrong in (replace(request, prompt=PROMPT[:-1]), replace(request, prompt=(3, *PROMPT[1:]))):
        with pytest.raises(NotReserved):
            engine.start_decode(wrong)
    with pytest.raises(InvalidParameter):
        engine.start_decode(replace(request, emitted=()))
    engine.reserve("blind", len(PROMPT), 100)
    with pytest.raises(NotReserved):
        engine.start_decode(replace(request, request_id="blind", prompt=PROMPT[:-1]))
    engine.release("blind")
    engine.start_decode(request)
    with pytest.raises(DuplicateRequest):
        engine.reserve("r", 5, 10)
    engine.cancel("r")
    assert of(run(engine), Finished)[0].reason is FinishReason.CANCELLED
    engine.memory.check_idle()


@pytest.mark.parametrize("phase", ["queued", "chunk", "held", "reserved", "imported", "decoding"])
def test_a_cancel_in_any_phase_of_a_handoff_returns_everything(phase: str) -> None:
    source, target = fake_engine(max_batch_tokens=9), fake_engine()
    request = PrefillRequest("r", PROMPT, GREEDY)
    if phase in ("imported", "decoding"):
        handoff(source, target, request)
        if phase == "decoding":
            target.step()
    else:
        source.submit_prefill(request)
        target.reserve("r", len(PROMPT), 100, b"", PROMPT)
        for _ in range({"queued": 0, "chunk": 2, "held": 99, "reserved": 99}[phase]):
            source.step()
    for engine in (source, target):
        engine.cancel("r")
        engine.cancel("r")
        run(engine)
        engine.memory.check_idle()
        assert engine.stats().waiting == engine.stats().running == engine.stats().held == engine.stats().reserved == 0
