"""The flow without a network: order of steps, other workers where some fail, and nothing held afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from fabric.errors import (
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidArgument,
    ServiceError,
    StaleTicket,
    Unavailable,
)
from protos.deepinfer.v1 import common_pb2, decode_pb2, gateway_pb2, prefill_pb2, recipe_pb2
from services.gateway import intake
from services.gateway.flow import Conductor
from services.gateway.handoff import Cleaner
from services.gateway.job import Job, ModelLimits, Update
from services.gateway.recovery import Bounds, RetryBudget
from services.gateway.router import Demand
from services.gateway.tenants import Tenant
from services.gateway.workers import Chosen
from tests.support.frontstack import until

EOS = 2


class FakeStream:
    """A call whose replies are computed from what was sent. Unavailable stands for a lost connection."""

    def __init__(self, reply: Callable[[Any], list[Any]], replies: list[Any] | None = None) -> None:
        self._reply = reply
        self.sent: list[Any] = []
        self.ready: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = self.told = False
        for item in replies or []:
            self.ready.put_nowait(item)

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        for item in self._reply(message):
            self.ready.put_nowait(item)

    async def receive(self) -> Any:
        item = await self.ready.get()
        if isinstance(item, ServiceError):
            self.told = not isinstance(item, Unavailable)
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True
        self.ready.put_nowait(Unavailable("cut"))


class Stage:
    """All services of a test: scripted, observed, failing on demand."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.tokens = [10, 11, 12, EOS]
        self.faults: dict[str, list[ServiceError]] = {}
        self.workers = 2
        self.released: list[tuple[str, int]] = []
        self.settled = 0
        self.failures: list[tuple[str, str, bool]] = []
        self.excluded: list[frozenset[str]] = []
        self.prefills: list[FakeStream] = []
        self.parses: list[FakeStream] = []
        self.generates: list[FakeStream] = []
        self.reserve_gate: asyncio.Event | None = None
        self.constraint = ""
        self.cached = [4]  # by prefill's account in each life, the last one again in those after it
        self.emitted = 0  # of the life that began last
        self.endless = False  # decode never ends
        self.slow = self.deaf = False  # prefill computes for ever; does not hear cancel
        self.replays = False  # decode draws the first token
        self.other_draw: int | None = None  # what prefill draws in later lives
        self.seeds: set[int] = set()
        self.prompts: list[list[int]] = []
        self.key, self.alone = "recipe", False  # of the recipe; whether there is no other

    def heard(self, when: str, code: str, goes_on: bool) -> None:
        self.failures.append((when, code, goes_on))

    def fault(self, name: str) -> ServiceError | None:
        self.log.append(name)
        faults = self.faults.get(name)
        return faults.pop(0) if faults else None

    def check(self, name: str) -> None:
        if error := self.fault(name):
            raise error

    # Workers
    def limits(self, model: str) -> ModelLimits:
        return ModelLimits(100, 120, 50, frozenset({EOS}))

    @contextmanager
    def recipe(self, model: str, excluded: frozenset[str]) -> Iterator[Stage]:
        if self.alone and "recipe" in self.log:
            raise Unavailable("no recipe service answers")
        self.log.append("recipe")
        yield self
        self.log.append("left")

    def choose(self, demand: Demand, excluded: frozenset[str]) -> Chosen:
        self.excluded.append(excluded)
        free = [number for number in range(self.workers) if not excluded & {f"p{number}", f"d{number}"}]
        if not free:
            raise Unavailable("nobody left")
        return Chosen(
            f"p{free[0]}", f"d{free[0]}", self, self, common_pb2.Layout(), "rev", self._settle, replays=self.replays
        )

    def _settle(self) -> None:
        self.settled += 1

    # Recipe
    async def render(self, request: Any, request_id: str) -> recipe_pb2.RenderResponse:
        self.check("render")
        return recipe_pb2.RenderResponse(token_ids=[5] * 8, default_max_tokens=50, constraint_kind=self.constraint)

    def parse(self, request_id: str) -> FakeStream:
        def reply(message: recipe_pb2.ParseRequest) -> list[Any]:
            if error := self.fault(f"parse.{message.WhichOneof('message')}"):
                return [error]
            if message.WhichOneof("message") == "tokens":
                text = ",".join(map(str, message.tokens.token_ids))
                return [recipe_pb2.ParseResponse(events=[recipe_pb2.ParseEvent(content=text)])]
            if message.WhichOneof("message") == "finish":
                done = recipe_pb2.ParseDone(reason=message.finish.reason, reasoning_tokens=3)
                return [recipe_pb2.ParseResponse(events=[recipe_pb2.ParseEvent(done=done)])]
            return []

        self.parses.append(FakeStream(reply))
        return self.parses[-1]

    # Prefill
    def prefill(self, request_id: str) -> FakeStream:
        def reply(message: prefill_pb2.PrefillRequest) -> list[Any]:
            kind = str(message.WhichOneof("message"))
            if error := self.fault(f"prefill.{kind}"):
                return [error]
            if kind == "cancel":
                return [] if self.deaf else [Cancelled("the caller sent cancel")]
            if kind == "start":
                self.begun(message.start)
                started = prefill_pb2.PrefillStarted(cached_tokens=self.cached[0])
                return [prefill_pb2.PrefillResponse(started=started)]
            return [self._done(message.attach.ticket)] if kind == "attach" and not self.slow else []

        self.prefills.append(FakeStream(reply))
        return self.prefills[-1]

    def begun(self, start: Any) -> None:
        """Notes what opens a life: the prompt with its emitted tokens, and the seed."""
        self.seeds.add(start.sampling.seed)
        self.emitted = start.emitted_tokens
        self.prompts.append(list(start.token_ids))

    def _done(self, ticket: common_pb2.Ticket) -> prefill_pb2.PrefillResponse:
        drawn = self.tokens[self.emitted] if not self.emitted or self.other_draw is None else self.other_draw
        first, replay = common_pb2.FirstToken(token_id=drawn), common_pb2.ReplayFrom(position=3)
        ending = {"replay_from": replay} if self.replays else {"first_token": first}
        receipt = common_pb2.Receipt(ticket_id=ticket.id, epoch=ticket.epoch, **ending)
        cached = self.cached.pop(0) if len(self.cached) > 1 else self.cached[0]
        usage = common_pb2.Usage(prompt_tokens=8, cached_tokens=cached)
        return prefill_pb2.PrefillResponse(done=prefill_pb2.PrefillDone(receipt=receipt, usage=usage))

    # Decode
    async def reserve(self, request: decode_pb2.ReserveRequest) -> decode_pb2.ReserveResponse:
        self.check("reserve")
        if self.reserve_gate is not None:
            await self.reserve_gate.wait()
        ticket = common_pb2.Ticket(id=f"t-{request.request_id}", epoch=1)
        return decode_pb2.ReserveResponse(ticket=ticket)

    def generate(self, request_id: str) -> FakeStream:
        def reply(message: decode_pb2.DecodeServiceGenerateRequest) -> list[Any]:
            if message.HasField("receipt"):
                return self.generated()
            error = self.fault("opening")
            return [error] if error else []

        self.generates.append(FakeStream(reply))
        return self.generates[-1]

    def generated(self) -> list[Any]:
        replies: list[Any] = []
        if error := self.fault("generate"):
            return [error]
        for index, token in list(enumerate(self.tokens))[self.emitted :]:
            if error := self.fault(f"token.{index}"):
                return [*replies, error]
            replies.append(decode_pb2.DecodeServiceGenerateResponse(first_index=index, token_ids=[token]))
        finish = decode_pb2.DecodeFinish(reason=common_pb2.FINISH_REASON_STOP, completion_tokens=len(self.tokens))
        if self.endless:
            return replies
        end = decode_pb2.DecodeServiceGenerateResponse(first_index=len(self.tokens), finish=finish)
        return [*replies, end, None]

    async def release(self, request: decode_pb2.ReleaseRequest, request_id: str, timeout_s: float) -> None:
        self.released.append((request.ticket_id, request.writer))


@pytest.fixture
def stage() -> Stage:
    return Stage()


JOB = Job(
    "r", "m", b"s", recipe_pb2.DIALECT_OPENAI_CHAT, SamplingParams(), None, "messages",
    render=recipe_pb2.RenderRequest(body=b"{}"),
)  # fmt: skip


def conductor(stage: Stage, cleaner: Cleaner, burst: int = 100, coalesce_s: float = 0.0) -> Conductor:
    """One whose pauses are short and whose budget is `burst` retries."""
    bounds = Bounds(moves=3, waits=5)
    budget = RetryBudget(0.0, 0.0, burst, lambda: 0.0)
    return Conductor(stage, cleaner, Random(1), budget, stage.heard, bounds, coalesce_s)


async def run(stage: Stage, job: Job = JOB, burst: int = 100) -> tuple[list[Update], ServiceError | None]:
    """All updates of a job and the error that ended them; releases have happened on return."""
    cleaner, updates, failure = Cleaner(), [], None
    try:
        async with conductor(stage, cleaner, burst).answer(job) as stream:
            async for update in stream:
                updates.append(update)
    except ServiceError as error:
        failure = error
    await cleaner.close()
    return updates, failure


def tokens(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.batch.token_ids]


async def test_an_answer_has_every_token_once_and_one_account(stage: Stage) -> None:
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens
    finish = updates[-1].finish
    assert finish is not None and [update.finish for update in updates[:-1]] == [None] * (len(updates) - 1)
    usage = finish.usage
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens)
    assert counts == (8, 4, 4, 3)
    assert stage.released == [] and stage.settled == 1


async def test_prefill_starts_before_decode_has_answered_and_parse_before_prefill_is_done(stage: Stage) -> None:
    await run(stage)
    steps = ("render", "prefill.start", "prefill.attach", "opening", "generate")
    order = [stage.log.index(step) for step in steps]
    assert stage.log.index("prefill.attach") < stage.log.index("parse.start") < stage.log.index("generate")
    assert order == sorted(order)


async def test_the_recipe_works_on_the_first_token_while_decode_verifies_and_nothing_is_said_before(
    stage: Stage,
) -> None:
    verified = stage.generated()
    stage.generated = list  # type: ignore[method-assign]  # decode verifies for ever
    running = asyncio.ensure_future(run(stage))
    await until(lambda: "parse.tokens" in stage.log, 20.0)
    assert not running.done()
    for reply in verified:
        stage.generates[0].ready.put_nowait(reply)
    updates, failure = await running
    assert failure is None and tokens(updates) == stage.tokens


async def test_a_first_token_that_decode_did_not_verify_is_told_anew_by_the_next_attempt(stage: Stage) -> None:
    stage.faults["token.0"] = [DataLoss("digest")]
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens
    assert stage.parses[0].cancelled and len(stage.parses) == 2
    assert "".join(event.content for event in updates[0].events) == "10"


async def test_a_decode_that_begins_with_another_token_is_not_believed(stage: Stage) -> None:
    other = Stage()
    other.tokens = [11, EOS]
    stage.generated = other.generated  # type: ignore[method-assign]
    updates, failure = await run(stage)
    assert updates == [] and isinstance(failure, Internal)


async def test_decode_hears_in_what_portions_tokens_are_wanted(stage: Stage) -> None:
    cleaner = Cleaner()
    async with conductor(stage, cleaner, coalesce_s=0.02).answer(JOB) as stream:
        assert tokens([update async for update in stream]) == stage.tokens
    await cleaner.close()
    assert stage.generates[0].sent[0].gather_ms == 20


async def test_tokens_that_came_together_leave_together(stage: Stage) -> None:
    updates, _ = await run(stage)
    assert len(updates) < len(stage.tokens)


@pytest.mark.parametrize("step", ["reserve", "prefill.start", "prefill.attach", "opening", "generate", "token.0"])
@pytest.mark.parametrize("error", [Unavailable("away"), DataLoss("digest"), StaleTicket("old")])
async def test_a_failure_before_the_first_token_is_retried_on_another_worker(
    stage: Stage, step: str, error: ServiceError
) -> None:
    stage.faults[step] = [error]
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens
    assert len(stage.excluded[1]) == 1 and next(iter(stage.excluded[1]))[0] == ("p" if "prefill" in step else "d")
    assert stage.settled == 2


@pytest.mark.parametrize("step", ["opening", "generate", "token.0", "token.2"])
async def test_cached_tokens_are_what_the_first_prefill_found_not_what_this_request_left_there(
    stage: Stage, step: str
) -> None:
    stage.cached, stage.faults[step] = [2, 6], [Unavailable("away")]
    updates, failure = await run(stage)
    assert failure is None and updates[-1].finish is not None
    assert len(stage.prefills) == 2 and updates[-1].finish.usage.cached_tokens == 2


async def test_a_fourth_failure_is_the_clients(stage: Stage) -> None:
    stage.faults["generate"] = [
        Unavailable("one"),
        Unavailable("two"),
        Unavailable("three"),
        last := Unavailable("four"),
    ]
    updates, failure = await run(stage)
    assert updates == [] and failure is last
    assert len(stage.released) == 4 and stage.failures == [("opening", "unavailable", True)] * 3 + [
        ("opening", "unavailable", False)
    ]


async def test_without_budget_the_next_failure_is_the_clients(stage: Stage) -> None:
    stage.faults["generate"] = [only := Unavailable("one")]
    updates, failure = await run(stage, burst=1)
    assert failure is None and tokens(updates) == stage.tokens
    stage.faults["generate"], stage.faults["token.2"] = [only], [Unavailable("two")]
    updates, failure = await run(stage, burst=1)
    assert tokens(updates) == [10, 11] and isinstance(failure, Unavailable) and "broke off" in failure.message


async def test_a_decode_that_is_lost_while_prefill_works_is_not_waited_for(stage: Stage) -> None:
    """Prefill itself would push to it until its own time limit."""
    stage.slow = True
    running = asyncio.ensure_future(run(stage))
    await until(lambda: bool(stage.generates and stage.generates[0].sent), 20.0)
    stage.slow = False
    stage.generates[0].ready.put_nowait(Unavailable("frozen"))
    updates, failure = await running
    assert failure is None and tokens(updates) == stage.tokens and stage.excluded[1] == {"d0"}


@pytest.mark.parametrize("error", [InvalidArgument("bad"), Internal("bug")])
async def test_what_cannot_work_is_not_retried(stage: Stage, error: ServiceError) -> None:
    stage.faults["reserve"] = [error]
    _, failure = await run(stage)
    assert failure is error and len(stage.excluded) == 1


async def test_a_single_worker_is_tried_again_once(stage: Stage) -> None:
    stage.workers = 1
    stage.faults["generate"] = [DataLoss("digest")]
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens
    stage.faults["reserve"] = [Exhausted("full"), full := Exhausted("full", retry_after_s=0.5)]
    _, failure = await run(stage)
    assert failure is full


ANYWHERE = [1, 2, 3]
LOST = [
    Unavailable("killed"), DataLoss("digest"), StaleTicket("old"), Exhausted("full"), DeadlineExceeded("the push"),
    Cancelled("a worker that stops"),
]  # fmt: skip


@pytest.mark.parametrize("index", ANYWHERE)
@pytest.mark.parametrize("error", LOST)
async def test_a_failure_after_the_first_token_moves_the_answer_to_other_workers(
    stage: Stage, index: int, error: ServiceError
) -> None:
    stage.faults[f"token.{index}"] = [error]
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens
    assert [update.batch.first_index for update in updates] == starts(updates)
    finish = updates[-1].finish
    assert finish is not None
    usage = finish.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (8, 4, 4)
    assert stage.prompts == [[5] * 8, [5] * 8 + stage.tokens[: index - 1]] and len(stage.seeds) == 1
    assert len(stage.parses) == 1 and stage.settled == 2 and stage.excluded[1] == {"d0"}


def starts(updates: list[Update]) -> list[int]:
    """The first index of each update, were they dense."""
    return [sum(len(update.batch.token_ids) for update in updates[:number]) for number in range(len(updates))]


@pytest.mark.parametrize("step", ["reserve", "prefill.start", "prefill.attach", "generate", "token.1", "token.2"])
async def test_a_move_that_fails_is_followed_by_another(stage: Stage, step: str) -> None:
    stage.faults["token.2"] = [Unavailable("killed")]

    def then(when: str, code: str, goes_on: bool) -> None:
        if not stage.failures:
            stage.faults[step] = [Unavailable("the next one, too")]
        stage.failures.append((when, code, goes_on))

    stage.heard = then  # type: ignore[method-assign]
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens
    assert stage.failures == [("streaming", "unavailable", True)] * 2


def losing_the_finish(stage: Stage) -> None:
    """The first life gives all tokens and breaks before it says that they are all."""
    whole = stage.generated
    lost = [*whole()[: len(stage.tokens)], Unavailable("killed")]
    stage.log.clear()
    calls = iter([lambda: lost])
    stage.generated = lambda: next(calls, whole)()  # type: ignore[method-assign]


async def test_an_answer_whose_last_word_was_lost_ends_where_its_newest_token_tells_so(stage: Stage) -> None:
    losing_the_finish(stage)
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens and len(stage.prompts) == 1
    finish = updates[-1].finish
    assert finish is not None and finish.reason == common_pb2.FINISH_REASON_STOP and finish.usage.completion_tokens == 4


async def test_an_answer_whose_stop_string_was_found_and_not_told_ends_as_decode_says(stage: Stage) -> None:
    """The newest token is shown to another decode as just drawn: it finds the end where the first one did."""
    stage.tokens = [10, 11, 12, 13]
    losing_the_finish(stage)
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens and updates[-1].finish is not None
    assert stage.prompts[1] == [5] * 8 + stage.tokens[:3]


@pytest.mark.parametrize("index", ANYWHERE)
async def test_where_decode_replays_all_sent_tokens_travel_and_none_comes_again(stage: Stage, index: int) -> None:
    stage.replays, stage.faults[f"token.{index}"] = True, [Unavailable("killed")]
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens
    assert stage.prompts[1] == [5] * 8 + stage.tokens[:index]


async def test_the_token_that_was_sent_counts_where_another_is_drawn_after_a_move(stage: Stage) -> None:
    stage.faults["token.2"], stage.other_draw = [Unavailable("killed")], 33
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens
    receipt = stage.generates[1].sent[1].receipt
    assert receipt.first_token.token_id == stage.tokens[1]


async def test_a_later_decode_that_begins_with_another_token_is_not_believed(stage: Stage) -> None:
    stage.faults["token.2"] = [Unavailable("killed")]
    other = decode_pb2.DecodeServiceGenerateResponse(first_index=1, token_ids=[33])
    calls = iter([stage.generated(), [other]])
    stage.generated = lambda: next(calls)  # type: ignore[method-assign]
    updates, failure = await run(stage)
    assert tokens(updates) == [10, 11] and isinstance(failure, Unavailable) and "broke off" in failure.message


@pytest.mark.parametrize("error", [InvalidArgument("bad"), Internal("bug")])
async def test_what_fails_anywhere_ends_the_answer_and_keeps_what_was_sent(stage: Stage, error: ServiceError) -> None:
    stage.faults["token.2"] = [error]
    updates, failure = await run(stage)
    assert tokens(updates) == [10, 11]
    assert isinstance(failure, Unavailable) and "broke off" in failure.message and failure.fix
    assert stage.released == [("t-r", decode_pb2.WRITER_STATE_FINISHED)]


async def test_without_a_spare_worker_the_answer_breaks_off_clearly(stage: Stage) -> None:
    stage.faults["token.2"] = [Unavailable("killed")]
    choose = stage.choose

    def once(demand: Demand, excluded: frozenset[str]) -> Chosen:
        if stage.prefills:
            raise Unavailable("no decode worker can take this request now")
        return choose(demand, excluded)

    stage.choose = once  # type: ignore[method-assign]
    updates, failure = await run(stage)
    assert tokens(updates) == [10, 11] and isinstance(failure, Unavailable) and "no decode worker" in failure.message


async def test_an_answer_under_way_waits_for_room_where_workers_are_full(stage: Stage) -> None:
    stage.faults["token.2"], stage.faults["reserve"] = [Unavailable("killed")], []
    reserve = stage.reserve

    async def full(request: decode_pb2.ReserveRequest) -> decode_pb2.ReserveResponse:
        if stage.failures and len(stage.failures) < 4:
            raise Exhausted("full", retry_after_s=0.001)
        return await reserve(request)

    stage.reserve = full  # type: ignore[method-assign]
    updates, failure = await run(stage, burst=1)
    assert failure is None and tokens(updates) == stage.tokens
    assert [code for _, code, _ in stage.failures] == ["unavailable", "exhausted", "exhausted", "exhausted"]


async def test_a_first_token_that_comes_with_the_end_is_told_with_it(stage: Stage) -> None:
    stage.tokens = [10]
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == [10] and updates[-1].finish is not None


async def test_a_token_that_comes_twice_ends_the_answer(stage: Stage) -> None:
    stage.tokens = [10, 11]
    first = stage.generated()[0]
    stage.generated = lambda: [first, first]  # type: ignore[method-assign]
    updates, failure = await run(stage)
    assert tokens(updates) == [10] and isinstance(failure, Unavailable)


@pytest.mark.parametrize(
    ("step", "error", "writer"),
    [
        ("prefill.start", Internal("bug"), decode_pb2.WRITER_STATE_FINISHED),
        ("prefill.attach", Internal("bug"), decode_pb2.WRITER_STATE_FINISHED),
        ("prefill.attach", DeadlineExceeded("the push"), decode_pb2.WRITER_STATE_UNKNOWN),
        ("generate", Internal("bug"), decode_pb2.WRITER_STATE_FINISHED),
    ],
)
async def test_a_release_says_what_is_known_of_the_writer(
    stage: Stage, step: str, error: ServiceError, writer: int
) -> None:
    stage.faults[step] = [error]
    await run(stage)
    assert stage.released == [("t-r", writer)]


async def test_a_lost_prefill_leaves_its_landing_in_doubt(stage: Stage) -> None:
    stage.faults["prefill.attach"] = [Unavailable("killed")] * 2
    await run(stage)
    assert [writer for _, writer in stage.released] == [decode_pb2.WRITER_STATE_UNKNOWN] * 2


async def left_while_prefill_runs(stage: Stage) -> None:
    """A client that leaves once prefill has its ticket."""
    cleaner = Cleaner()

    async def answer() -> None:
        async with conductor(stage, cleaner).answer(JOB):
            pass

    task = asyncio.create_task(answer())
    await until(lambda: bool(stage.prefills) and len(stage.prefills[0].sent) == 2, 20.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await cleaner.close()


async def test_a_client_that_leaves_lets_prefill_say_when_it_writes_no_more(stage: Stage) -> None:
    stage.slow = True
    await left_while_prefill_runs(stage)
    assert [message.WhichOneof("message") for message in stage.prefills[0].sent] == ["start", "attach", "cancel"]
    assert stage.released == [("t-r", decode_pb2.WRITER_STATE_UNKNOWN), ("t-r", decode_pb2.WRITER_STATE_FINISHED)]


async def test_a_prefill_that_does_not_say_so_in_time_is_cut_and_stays_in_doubt(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.handoff._STOP_S", 0.05)
    stage.slow = stage.deaf = True
    await left_while_prefill_runs(stage)
    assert stage.prefills[0].cancelled and stage.released == [("t-r", decode_pb2.WRITER_STATE_UNKNOWN)]


async def test_a_reservation_still_under_way_is_released_when_it_arrives(stage: Stage) -> None:
    stage.reserve_gate = asyncio.Event()
    cleaner = Cleaner()

    async def answer() -> None:
        async with conductor(stage, cleaner).answer(JOB):
            pass

    task = asyncio.create_task(answer())
    await until(lambda: "reserve" in stage.log and "prefill.start" in stage.log, 20.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.prefills[0].cancelled and stage.settled == 1
    stage.reserve_gate.set()
    await cleaner.close()
    assert stage.released == [("t-r", decode_pb2.WRITER_STATE_NEVER_STARTED)]


async def test_leaving_early_ends_every_call(stage: Stage) -> None:
    cleaner = Cleaner()
    stage.endless = True
    async with conductor(stage, cleaner).answer(JOB):
        pass
    await cleaner.close()
    assert stage.prefills[0].cancelled and stage.parses[0].cancelled
    assert stage.released == [("t-r", decode_pb2.WRITER_STATE_FINISHED)]


async def test_a_first_token_that_ends_the_answer_needs_no_decode(stage: Stage) -> None:
    stage.tokens = [EOS]
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == [EOS]
    assert "generate" not in stage.log and stage.released == [("t-r", decode_pb2.WRITER_STATE_FINISHED)]


@pytest.mark.parametrize("answer", [[10, 11, EOS], [EOS], [0]])
async def test_where_decode_replays_every_token_comes_from_it(stage: Stage, answer: list[int]) -> None:
    stage.tokens, stage.replays = answer, True
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == answer
    assert "generate" in stage.log and stage.released == []


@pytest.mark.parametrize("step", ["render", "parse.start", "parse.tokens", "parse.finish"])
async def test_a_recipe_that_is_lost_is_not_the_workers_fault_and_another_goes_on(stage: Stage, step: str) -> None:
    stage.faults[step] = [Unavailable("recipe died")]
    updates, failure = await run(stage)
    assert failure is None and tokens(updates) == stage.tokens and updates[-1].finish is not None
    assert len(stage.excluded) == len(stage.prompts) == 1 and stage.released == []
    assert stage.failures == [("rendering" if step == "render" else "parsing", "unavailable", True)]
    assert stage.log.count("recipe") == stage.log.count("left") == 2


@pytest.mark.parametrize("step", ["render", "parse.start", "parse.tokens"])
async def test_where_no_other_recipe_is_a_request_fails_clearly_and_holds_nothing(stage: Stage, step: str) -> None:
    stage.alone, stage.faults[step] = True, [Unavailable("recipe died")]
    updates, failure = await run(stage)
    assert updates == [] and isinstance(failure, Unavailable) and len(stage.excluded) <= 1
    assert stage.log.count("recipe") == stage.log.count("left")
    assert all(writer == decode_pb2.WRITER_STATE_FINISHED for _, writer in stage.released)


async def test_what_the_engine_cannot_enforce_is_refused(stage: Stage) -> None:
    stage.constraint = "json"
    _, failure = await run(stage)
    assert isinstance(failure, InvalidArgument) and failure.field == "response_format"
    assert stage.prefills == []


@pytest.mark.parametrize(
    ("said", "http", "grpc"),
    [
        ("tools[1].function.parameters", "tools[1].function.parameters", "tools[1].parameters_json"),
        ("messages[0].tool_calls[2].function.name", "messages[0].tool_calls[2].function.name", None),
        ("thinking.type", "thinking.type", "thinking"),
        ("max_tokens", "max_tokens", "sampling.max_tokens"),
        ("top_logprobs", "top_logprobs", "sampling.logprobs"),
    ],
)
async def test_what_the_recipe_refuses_is_named_as_its_client_calls_it(
    stage: Stage, said: str, http: str, grpc: str | None
) -> None:
    stamp = intake.Stamp("r", Tenant("t", b"t"), 1)
    message = gateway_pb2.ChatRequest(model="m", messages=[gateway_pb2.ChatMessage(role="user", content="x")])
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
    named = []
    for job in (intake.chat_from_body(body, stamp), intake.chat_from_message(message, stamp)):
        stage.faults["render"] = [InvalidArgument("the value is not accepted", field=said, fix="use another")]
        _, failure = await run(stage, job)
        assert isinstance(failure, InvalidArgument) and failure.fix == "use another"
        named.append(failure.field)
    assert named == [http, grpc or "messages[0].tool_calls[2].name"]


async def test_token_ids_need_no_rendering(stage: Stage) -> None:
    job = Job("r", "m", b"s", recipe_pb2.DIALECT_TEXT, SamplingParams(), 9, "token_ids", token_ids=(1, 2, 3, 4, 5))
    updates, failure = await run(stage, job)
    assert failure is None and "render" not in stage.log
    assert updates[-1].finish is not None and updates[-1].finish.usage.prompt_tokens == 5
