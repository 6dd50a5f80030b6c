"""The slab book against a simple model: conservation, exclusivity, and no reuse while a writer is in doubt."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from fabric.errors import Exhausted, InvalidArgument
from fabric.kvlink.slabs import SlabBook, SlabState, Writer

SLABS, SLAB_BYTES = 12, 100


class SlabMachine(RuleBasedStateMachine):
    """Owners come and go with every kind of writer; readers may hold a grant meanwhile."""

    owners: Bundle[str] = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.book = SlabBook(SLABS, SLAB_BYTES, max_doubt_share=0.5)
        self.held: dict[str, set[int]] = {}  # owner -> slabs it must still hold
        self.doubted: set[str] = set()
        self.readers: list[tuple[str, object]] = []
        self.now = 0.0
        self.serial = 0

    @rule(target=owners, nbytes=st.integers(1, 5 * SLAB_BYTES))
    def grant(self, nbytes: int) -> str:
        self.serial += 1
        owner = f"o{self.serial}"
        try:
            grant = self.book.take(owner, nbytes)
        except Exhausted:
            return owner
        slabs = set(range(grant.first, grant.first + grant.count))
        assert grant.count == -(-nbytes // SLAB_BYTES)
        assert all(not slabs & others for others in self.held.values()), "a slab in use or in doubt was granted"
        self.held[owner] = slabs
        return owner

    @rule(owner=owners, writer=st.sampled_from(Writer))
    def release(self, owner: str, writer: Writer) -> None:
        read = any(name == owner for name, _ in self.readers)
        released = self.book.release(owner, writer, self.now)
        if owner not in self.held:
            assert not released
        elif not read:
            if writer is Writer.UNKNOWN:
                assert released is (owner not in self.doubted)
                self.doubted.add(owner)
            else:
                assert released
                self._gone(owner)

    @rule(owner=consumes(owners))
    def read(self, owner: str) -> None:
        if owner in self.held and owner not in self.doubted:
            self.readers.append((owner, self.book.read(owner)))
        else:
            with pytest.raises(InvalidArgument):
                self.book.read(owner)

    @rule()
    def finish_reading(self) -> None:
        if self.readers:
            owner, grant = self.readers.pop(0)
            self.book.read_done(grant, self.now)
            if not any(name == owner for name, _ in self.readers):
                found = self.book.find(owner)
                if found is None:
                    self._gone(owner)
                elif found.state is not SlabState.GRANTED:
                    self.doubted.add(owner)

    @rule(seconds=st.floats(0, 50))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.book.retire(self.now, after_s=60.0)

    @invariant()
    def slabs_are_conserved(self) -> None:
        assert sum(self.book.count().values()) == SLABS

    @invariant()
    def held_slabs_are_not_free(self) -> None:
        held = sum(len(slabs) for slabs in self.held.values())
        assert self.book.count()[SlabState.FREE] == SLABS - held

    def _gone(self, owner: str) -> None:
        self.held.pop(owner, None)
        self.doubted.discard(owner)


TestSlabs = SlabMachine.TestCase
TestSlabs.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def book() -> SlabBook:
    return SlabBook(SLABS, SLAB_BYTES, max_doubt_share=0.25)


def test_a_slab_in_doubt_returns_only_on_the_writers_word_or_its_death(book):
    for owner, word in (("a", Writer.FINISHED), ("b", Writer.DEAD)):
        book.take(owner, 100)
        assert book.release(owner, Writer.UNKNOWN, 0.0)
        assert not book.release(owner, Writer.UNKNOWN, 0.0)
        assert book.count()[SlabState.QUARANTINED] == 1
        assert book.release(owner, word, 0.0)
        assert book.count()[SlabState.FREE] == SLABS


def test_silence_retires_a_slab_and_proof_still_brings_it_back(book):
    book.take("a", 100)
    book.release("a", Writer.UNKNOWN, 10.0)
    assert book.retire(69.9, 60.0) == 0
    assert book.retire(70.0, 60.0) == 1
    assert book.count()[SlabState.RETIRED] == 1
    assert book.release("a", Writer.DEAD, 80.0)
    assert book.count()[SlabState.FREE] == SLABS


def test_memory_in_doubt_is_capped(book):
    for index in range(4):
        book.take(f"o{index}", 100)
        book.release(f"o{index}", Writer.UNKNOWN, 0.0)
    with pytest.raises(Exhausted, match="in doubt"):
        book.take("more", 100)
    book.release("o0", Writer.FINISHED, 0.0)
    book.take("more", 100)


def test_a_release_during_a_read_waits_for_it(book):
    grant = book.take("a", 250)
    book.read("a")
    assert book.release("a", Writer.FINISHED, 0.0)
    assert book.count()[SlabState.FREE] == SLABS - 3
    with pytest.raises(InvalidArgument):
        book.read("a")
    book.read_done(grant, 0.0)
    assert book.count()[SlabState.FREE] == SLABS


def test_better_news_during_a_read_wins(book):
    grant = book.take("a", 100)
    book.read("a")
    book.release("a", Writer.UNKNOWN, 0.0)
    book.release("a", Writer.FINISHED, 0.0)
    book.read_done(grant, 0.0)
    assert book.count()[SlabState.FREE] == SLABS


def test_a_grant_needs_contiguous_slabs(book):
    for index in range(SLABS):
        book.take(str(index), 100)
    for index in range(0, SLABS, 2):
        book.release(str(index), Writer.FINISHED, 0.0)
    with pytest.raises(Exhausted):
        book.take("wide", 101)
    book.release("3", Writer.FINISHED, 0.0)
    assert book.take("wide", 300).first == 2


@pytest.mark.parametrize("nbytes", [0, -1, SLABS * SLAB_BYTES + 1])
def test_a_size_that_never_fits_is_a_wrong_argument(book, nbytes):
    with pytest.raises(InvalidArgument):
        book.take("a", nbytes)
