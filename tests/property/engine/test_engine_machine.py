"""A state machine over the whole engine: requests of all lives come, pause, are cancelled and released in any order.

After every rule ids are conserved, and every token equals the token the same request gets alone. At the end everybody
still wanted finishes within a bounded number of steps, and nothing is held.
"""

from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import Exhausted
from engine.events import Event, Failed, Finished, FirstToken
from engine.requests import DecodeRequest, GenerateRequest, PrefillRequest
from engine.sampling.params import SamplingParams
from tests.support.driving import copy_kv, of, run, tokens_of
from tests.support.fakefamily import fake_engine

BASE = tuple(2 + (5 * place * place) % 47 for place in range(40))
PROMPTS = [BASE[:length] for length in (3, 8, 17, 33)] + [(9, *BASE[:20]), (*BASE[:16], 9, 9, 9)]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.3, max_tokens=28, ignore_eos=True, seed=5, presence_penalty=0.5),
]


@cache
def alone(prompt: int, sampling: int) -> list[int]:
    """The oracle: the same request on a fresh engine."""
    engine = fake_engine()
    engine.submit(GenerateRequest("alone", PROMPTS[prompt], SAMPLINGS[sampling], cache=False))
    return tokens_of(run(engine), "alone")


class EngineMachine(RuleBasedStateMachine):
    """Nine blocks: two or three sequences fit, so preemption and eviction are the rule, not the exception."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = fake_engine(num_blocks=9, num_slots=6, max_batch_tokens=11, max_sequences=5, max_waiting=6)
        self.source = fake_engine()
        self.names = 0
        self.wanted: dict[str, tuple[int, int]] = {}
        self.events: list[Event] = []
        self.held: set[str] = set()
        self.paused: set[str] = set()

    def _name(self) -> str:
        self.names += 1
        return f"r{self.names}"

    @initialize()
    def crowd(self) -> None:
        """Four that start small and grow together: more than the blocks can hold."""
        for prompt in (0, 1, 2, 0):
            self.submit(prompt, 1, 0, True, False, b"")

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1), sampling=st.integers(0, 1), priority=st.integers(-2, 2),
        use_cache=st.booleans(), prefill=st.booleans(), salt=st.sampled_from([b"", b"tenant"]),
    )  # fmt: skip
    def submit(self, prompt: int, sampling: int, priority: int, use_cache: bool, prefill: bool, salt: bytes) -> None:
        name = self._name()
        kind, begin = (PrefillRequest, self.engine.submit_prefill) if prefill else (GenerateRequest, self.engine.submit)
        try:
            begin(kind(name, PROMPTS[prompt], SAMPLINGS[sampling], salt, use_cache, priority))
        except Exhausted:
            return
        self.wanted[name] = (prompt, sampling)

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), sampling=st.integers(0, 1), start=st.booleans())
    def import_and_decode(self, prompt: int, sampling: int, start: bool) -> None:
        name, tokens, params = self._name(), PROMPTS[prompt], SAMPLINGS[sampling]
        try:
            reservation = self.engine.reserve(name, len(tokens), len(tokens) + params.max_tokens, b"", tokens)
        except Exhausted:
            return
        if not start:
            self.engine.release(name)
            return
        self.source.submit_prefill(PrefillRequest(name, tokens, params))
        (first,) = of(run(self.source), FirstToken)
        copy_kv(self.source, self.engine, name, reservation)
        self.source.release(name)
        self.events.append(first)
        self.engine.start_decode(DecodeRequest(name, tokens, (first.token,), params, first.state))
        self.wanted[name] = (prompt, sampling)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            events = self.engine.step()
            self.events.extend(events)
            self.held |= {event.request_id for event in of(events, FirstToken) if event.held}
            for event in of(events, Finished) + of(events, Failed):
                self._check(event)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), release=st.booleans())
    def leave(self, data: st.DataObject, release: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        (self.engine.release if release else self.engine.cancel)(name)
        self._forget(name)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def receipt(self, data: st.DataObject) -> None:
        self._receipt(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data: st.DataObject, paused: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        self.engine.pause(name, paused)
        (self.paused.add if paused else self.paused.discard)(name)

    @invariant()
    def ids_are_conserved(self) -> None:
        self.engine.memory.check()
        stats = self.engine.stats()
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total
        assert stats.anchors <= stats.slots_total

    def teardown(self) -> None:
        for name in self.paused:
            self.engine.pause(name, False)
        for name in sorted(self.held):
            self._receipt(name)
        work = sum(len(PROMPTS[prompt]) + SAMPLINGS[sampling].max_tokens for prompt, sampling in self.wanted.values())
        for _ in range(20 * (work + 1)):  # starvation would show here
            self.step(1)
            for name in sorted(self.held):
                self._receipt(name)
            if not self.engine.has_work:
                break
        assert not self.wanted, f"never finished: {self.wanted}, {self.engine.stats()}"
        self.engine.memory.check_idle()

    def _receipt(self, name: str) -> None:
        """A held prefill's first token is right, and its memory comes back on release."""
        assert tokens_of(self.events, name) == alone(*self.wanted[name])[:1]
        self.engine.release(name)
        self._forget(name)

    def _check(self, event: Event) -> None:
        if event.request_id in self.wanted:
            assert isinstance(event, Finished), event
            assert tokens_of(self.events, event.request_id) == alone(*self.wanted[event.request_id])
            self._forget(event.request_id)

    def _forget(self, name: str) -> None:
        self.wanted.pop(name, None)
        self.held.discard(name)
        self.paused.discard(name)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
