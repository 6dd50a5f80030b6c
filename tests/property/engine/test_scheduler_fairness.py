"""The scheduler alone, without a model: bounded waiting, order, budget and conservation over random traffic."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.intake import Intake
from engine.memory import KVMemory
from engine.requests import GenerateRequest
from engine.sampling.params import SamplingParams
from engine.scheduler import Plan, Scheduler, SchedulerPolicy
from engine.sequence import Phase, Role, Sequence
from tests.support.fakefamily import BLOCK_TOKENS, MODEL

BLOCKS, SLOTS, MAX_SEQUENCES, MAX_TOKENS = 10, 4, 4, 15
requests = st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(-8, 8), st.booleans())
traffic = st.lists(st.lists(requests, max_size=2), min_size=1, max_size=25)


class Traffic:
    """Feeds a scheduler and commits its plans with made-up tokens. One step is one tick of the fake clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.memory = KVMemory(BLOCKS, SLOTS, BLOCK_TOKENS)
        self.scheduler = Scheduler(SchedulerPolicy(MAX_TOKENS, MAX_SEQUENCES, 100, 2), self.memory, lambda: self.now_s)
        self.intake = Intake(MODEL, BLOCKS, None, lambda: self.now_s)
        self.order: list[Sequence] = []
        self.waited: dict[str, int] = {}

    def arrive(self, prompt: int, new: int, priority: int, use_cache: bool) -> None:
        name = f"r{len(self.order)}"
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        request = GenerateRequest(name, (5,) * prompt, params, cache=use_cache, priority=priority)
        sequence = self.intake.sequence(request, Role.WHOLE)
        self.scheduler.add(sequence)
        self.order.append(sequence)

    def step(self) -> Plan:
        self.now_s += 1.0
        plan = self.scheduler.plan()
        assert sum(chunk.count for chunk in plan.chunks) <= MAX_TOKENS
        assert len({chunk.sequence.request_id for chunk in plan.chunks}) == len(plan.chunks) <= MAX_SEQUENCES
        for restore in plan.restores:
            self.scheduler.restored(restore)
        for chunk in plan.chunks:
            self._commit(chunk.sequence, chunk.end)
        self.memory.check()
        return plan

    def _commit(self, sequence: Sequence, end: int) -> None:
        assert len(sequence.blocks) >= self.memory.blocks_for(end) and sequence.slot is not None
        sequence.computed_tokens = end
        full = end // BLOCK_TOKENS
        if sequence.cache and full > sequence.sealed_blocks:
            sequence.chain.grow(sequence.tokens[:end])
            self.memory.index.insert(
                sequence.chain, sequence.sealed_blocks, sequence.blocks[sequence.sealed_blocks : full]
            )
            sequence.sealed_blocks = full
        if sequence.pending_tokens == 0:
            sequence.tokens.append(6)
            sequence.output.append(6)
            sequence.stop = sequence.watch.push(6)
            if sequence.stop is not None:
                self.scheduler.remove(sequence, Phase.ENDED)


@settings(max_examples=150, deadline=None)
@given(traffic=traffic)
def test_every_request_finishes_within_a_bound_and_the_first_in_order_always_advances(traffic: list) -> None:
    run = Traffic()
    for arrivals in traffic:
        for arrival in arrivals:
            run.arrive(*arrival)
        run.step()
    alive = [one for one in run.order if one.phase is not Phase.ENDED]
    bound = sum(2 + one.total_tokens + one.sampling.max_tokens for one in alive)
    for _ in range(bound):
        alive = [one for one in run.order if one.phase is not Phase.ENDED]
        if not alive:
            break
        first = min(alive, key=lambda one: one.rank)
        before = (first.computed_tokens, len(first.output))
        plan = run.step()
        assert first.phase is Phase.ENDED or (first.computed_tokens, len(first.output)) > before or plan.chunks
    assert all(one.phase is Phase.ENDED for one in run.order)
    run.memory.check_idle()


def test_a_low_priority_request_is_served_though_higher_ones_never_stop_coming() -> None:
    """A priority point passes 64 requests, so the lowest waits for 16 * 64 of the highest and not for one more."""
    run = Traffic()
    for _ in range(MAX_SEQUENCES + 1):
        run.arrive(3, 8, 8, False)
    run.arrive(8, 2, -8, False)
    victim = run.order[-1]
    served_before = 0
    while victim.phase is Phase.WAITING:
        while run.scheduler.can_add():  # the queue is never anything but full of requests that may pass
            run.arrive(3, 8, 8, False)
        served_before = sum(one.phase is not Phase.WAITING for one in run.order)
        assert served_before <= 16 * 64 + MAX_SEQUENCES + 1
        run.step()
    assert served_before >= 16 * 64, "priority must matter as well"
