"""Windows after a hit, in every family that has them: recompute is exact, replay is not, neither writes an entry."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from engine.cache.pool import CachePool
from engine.families import Family
from engine.families.v4.tiny import TinySpec, write_tiny
from engine.families.v41.options import Options
from engine.windows import policy_of, window_tokens
from tests.support.replays import WINDOW, replaying, resumed_rows
from tests.support.tiny import Piece, batch_of, fresh_pool, random_tokens, run_in_chunks, tiny_family
from tests.unit.families.v41.material import DATA, opened

TOKENS = random_tokens(330, 21, 511)
BOUNDARIES = (32, 64, 112, 128, 208, 256)  # ends of blocks, below and above what is recomputed
QUANTIZED = (("head_dim", 80), ("qk_rope_head_dim", 16), ("serving", {"fake_quantize": True}))


@dataclass(frozen=True, slots=True)
class Subject:
    """A family, its logits of a cold run, and the blocks that this run left."""

    family: Family
    cold: torch.Tensor
    entries: torch.Tensor

    def pool(self) -> CachePool:
        """The entries of the cold run in blocks 0.., every window and every other block NaN."""
        pool = fresh_pool(self.family)
        pool.blocks.copy_(self.entries)
        return pool

    def tokens(self, policy: str) -> int:
        """What a policy recomputes before the end of a hit."""
        return policy_of(self.family.layout, policy).tokens

    def after(self, hit: int, tokens: int, chunk: int = 64, pool: CachePool | None = None) -> torch.Tensor:
        """Logits from the end of the hit on."""
        found = resumed_rows(self.family, pool or self.pool(), TOKENS, hit, chunk, replayed=tokens)
        return found[min(hit, tokens) :]

    def moved(self, hit: int, tokens: int) -> float:
        """Mean divergence of the distributions after the hit from those of the cold run, in nats."""
        cold, found = (logits.log_softmax(-1) for logits in (self.cold[hit:], self.after(hit, tokens)))
        return float((cold.exp() * (cold - found)).sum(1).mean())


@pytest.fixture(scope="module", params=["v4", "v4 quantized", "v41", "v41 quantized"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    name, quantized = request.param[:3].strip(), "quantized" in request.param
    if name == "v41":
        family: Family = opened(DATA / "tiny-q", options=Options(fake_quantize=quantized))
    else:
        spec = TinySpec(seed=5, upstream=quantized, overrides=QUANTIZED if quantized else ())
        family = tiny_family(write_tiny(tmp_path_factory.mktemp("tiny"), spec))
    pool = fresh_pool(family)
    cold = run_in_chunks(family, pool, TOKENS, len(TOKENS))
    return Subject(family, cold, pool.blocks.clone())


@pytest.mark.parametrize("hit", BOUNDARIES)
def test_as_many_windows_as_layers_are_exact(hit: int, subject: Subject) -> None:
    found = subject.after(hit, subject.tokens("recompute"))
    assert torch.isfinite(found).all(), "a window row from before the first recomputed token was read"
    assert torch.equal(found, subject.cold[hit:])


def test_windows_stack_by_all_but_their_own_token_and_no_further(subject: Subject) -> None:
    """A row sees its window's other rows, so each layer reaches `window - 1` further back."""
    layers = subject.family.layout.group("window").layers
    reach = layers * (WINDOW - 1)
    assert subject.tokens("recompute") == layers * WINDOW
    assert torch.equal(subject.after(256, reach), subject.cold[256:])
    if not subject.family.options.fake_quantize:  # rounding may swallow what so little moves
        assert not torch.equal(subject.after(256, reach - 1), subject.cold[256:])


@pytest.mark.parametrize("hit", BOUNDARIES)
def test_one_window_moves_the_distributions_and_is_better_than_a_quarter_of_one(hit: int, subject: Subject) -> None:
    one, quarter = (subject.moved(hit, tokens) for tokens in (WINDOW, WINDOW // 4))
    assert 0.01 < one < 1.2, "nats of random weights"
    assert one < quarter


@pytest.mark.parametrize("policy", ["replay", "recompute"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 100, 330])
def test_chunks_change_nothing(policy: str, chunk: int, subject: Subject) -> None:
    tokens = subject.tokens(policy)
    assert torch.equal(subject.after(208, tokens, chunk), subject.after(208, tokens, 330))


@pytest.mark.parametrize("policy", ["replay", "recompute"])
@pytest.mark.parametrize("hit", [32, 208])
def test_entries_of_the_hit_are_read_and_never_written(policy: str, hit: int, subject: Subject) -> None:
    pool, blocks = subject.pool(), hit // subject.family.layout.block_tokens
    subject.after(hit, subject.tokens(policy), 50, pool)
    assert torch.equal(pool.blocks[:blocks], subject.entries[:blocks])
    other = subject.pool()
    other.blocks[:blocks].fill_(0)
    cold = subject.cold[hit:]
    assert (subject.after(hit, subject.tokens(policy), 50, other) - cold).abs().max() > 0.01, "they are not read"


def test_a_floor_below_the_first_replayed_token_reaches_what_is_not_there(subject: Subject) -> None:
    """The NaN that the other tests rely on does show."""
    batch = replaying(batch_of([Piece(TOKENS[192:256], 192, range(21), 1)]), TOKENS, 208, replayed=2 * WINDOW)
    assert torch.isnan(subject.family.forward(batch, subject.pool())).any()


def test_a_replay_shares_its_batch_with_a_decode(subject: Subject) -> None:
    family, pool = subject.family, subject.pool()
    run_in_chunks(family, pool, TOKENS[:80], 80, first_block=32, slot=2)
    alone = subject.after(208, WINDOW, 330)
    pieces = [Piece(TOKENS[80:81], 80, range(32, 38), 2), Piece(TOKENS[192:], 192, range(21), 1)]
    batch = replaying(batch_of(pieces), TOKENS)
    batch.replay.hits[:] = 0, 208
    found = family.forward(batch, pool)
    assert torch.equal(found[0], subject.cold[80])
    assert torch.equal(found[1 + WINDOW :], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hits": np.array([64, 64])}, "one prefix for each"),
        ({"hits": np.array([-1])}, "one prefix for each"),
        ({"hits": np.array([100])}, "begin before the replay"),
        ({"tokens": 0}, "cannot be replayed"),
    ],
)
def test_hits_that_do_not_fit_the_batch_are_refused(change: dict, message: str, subject: Subject) -> None:
    batch = replaying(batch_of([Piece(TOKENS[:20], 48, range(8), 0)]), TOKENS)
    with pytest.raises(ValueError, match=message):
        subject.family.forward(replace(batch, replay=replace(batch.replay, **change)), subject.pool())


def test_the_tiny_models_have_the_window_that_these_tests_speak_of(subject: Subject) -> None:
    assert window_tokens(subject.family.layout) == WINDOW


def test_a_batch_that_wants_no_logits_gets_none(subject: Subject) -> None:
    batch = replace(batch_of([Piece(TOKENS[:20], 0, range(8), 0)]), logit_rows=np.empty(0, np.int64))
    assert subject.family.forward(replaying(batch, TOKENS), subject.pool()).shape == (0, subject.family.vocab_size)
