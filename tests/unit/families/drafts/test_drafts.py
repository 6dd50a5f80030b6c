"""The MTP blocks of V3, V3.2 and V4 equal dense float64 references, however tokens are cut and whatever is cached."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.families import Family, open_family
from engine.families.draft import Draft
from engine.families.mla import tiny as mla_tiny
from engine.families.v4 import tiny as v4_tiny
from kernels import choose
from tests.support import dense_mla, dense_v4
from tests.support.dense_numbers import read
from tests.support.tiny import BLOCK_TOKENS, Piece, batch_of, random_tokens

BAR, MISS = 1e-3, 0.05
LENGTHS = (1, 5, 15, 16, 17, 33, 70)
MTP_BLOCKS = 2


def write_v4(folder: Path) -> Path:
    return v4_tiny.write_tiny(folder, v4_tiny.TinySpec(seed=11, upstream=True, mtp_layers=MTP_BLOCKS))


def write_mla(name: str) -> Callable[[Path], Path]:
    changes = {"num_nextn_predict_layers": MTP_BLOCKS}
    return lambda folder: mla_tiny.write_tiny(folder, mla_tiny.TinySpec(name, 12, changes))


FAMILIES = {
    "v3": (write_mla("v3"), dense_mla.DenseDraft),
    "v32": (write_mla("v32"), dense_mla.DenseDraft),
    "v4": (write_v4, dense_v4.DenseDraft),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with drafts, and what its blocks must answer."""

    folder: Path
    family: Family
    dense: Callable[[int], dense_mla.DenseDraft | dense_v4.DenseDraft]

    @property
    def draft(self) -> Draft:
        assert self.family.draft is not None
        return self.family.draft


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    write, dense = FAMILIES[request.param]
    folder = write(tmp_path_factory.mktemp(request.param))
    given = read(folder)
    return Subject(folder, opened(folder), lambda block: dense(*given, block))


def opened(folder: Path, kernels: str = "cpu") -> Family:
    return open_family(folder, torch.float32, False, choose(kernels), block_tokens=BLOCK_TOKENS)


def pools(family: Family) -> tuple[CachePool, CachePool]:
    """Of the model and of its draft; reading what nobody wrote gives NaN."""
    assert family.draft is not None
    made = [CachePool(layout, 64, 8, torch.float32) for layout in (family.layout, family.draft.layout)]
    for pool in made:
        pool.blocks.fill_(0xFF)
        pool.slots.fill_(0xFF)
    return made[0], made[1]


def shifted(batch: RaggedBatch, tokens: list[int]) -> RaggedBatch:
    """The draft's batch: each row's token is the one that follows."""
    return replace(batch, tokens=np.asarray(tokens, np.int64))


def drafted(
    family: Family, tokens: list[int], chunk: int, shift: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States of the model, the draft's logits and its states for all but the last of `tokens`, in chunks."""
    main, own = pools(family)
    blocks, found = range(family.layout.blocks_for(len(tokens))), []
    for at in range(0, len(tokens) - 1, chunk):
        end = min(at + chunk, len(tokens) - 1)
        batch = batch_of([Piece(tokens[at:end], at, blocks, 2)])
        hidden = family.draft.follow(batch, main).hidden
        guess = family.draft.forward(shifted(batch, tokens[at + shift : end + shift]), hidden, own)
        found.append((hidden, guess.logits, guess.hidden))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


@pytest.mark.parametrize("length", LENGTHS)
def test_every_chunking_equals_the_dense_reference(length: int, subject: Subject) -> None:
    tokens = random_tokens(length + 1, length)
    states = None
    for chunk in (length, 1, 3, 7, 16):
        hidden, logits, behind = drafted(subject.family, tokens, chunk)
        wanted, wanted_behind = subject.dense(0).forward(hidden, tokens[1:])
        assert wanted.std() > 1, "a degenerate block would prove nothing"
        assert (logits - wanted).abs().max() <= BAR, f"chunks of {chunk}"
        assert (behind - wanted_behind).abs().max() <= BAR
        assert states is None or (hidden - states).abs().max() <= BAR
        states = hidden


def test_the_model_answers_as_without_a_draft(subject: Subject) -> None:
    tokens = random_tokens(40, 1)
    batch = batch_of([Piece(tokens, 0, range(3), 2)])
    followed = subject.draft.follow(batch, pools(subject.family)[0])
    assert torch.equal(followed.logits, subject.family.forward(batch, pools(subject.family)[0]))
    assert (subject.dense(0).model_logits(followed.hidden) - followed.logits).abs().max() <= BAR


def test_the_reference_kernels_agree(subject: Subject) -> None:
    tokens = random_tokens(34, 2)
    hidden, logits, _ = drafted(opened(subject.folder, "reference"), tokens, 7)
    assert (logits - subject.dense(0).forward(hidden, tokens[1:])[0]).abs().max() <= BAR


def test_a_ragged_batch_equals_each_sequence_alone(subject: Subject) -> None:
    family, (main, own) = subject.family, pools(subject.family)
    prompts, done = [random_tokens(count, 50 + count) for count in (71, 34, 18)], (0, 20, 16)
    tables, slots = (range(10, 20), range(30, 20, -1), range(10)), (4, 1, 6)
    cached = [Piece(p[:n], 0, b, s) for p, n, b, s in zip(prompts, done, tables, slots, strict=True) if n]
    rest = [Piece(p[n:-1], n, b, s) for p, n, b, s in zip(prompts, done, tables, slots, strict=True)]
    earlier = [(prompt, n) for prompt, n in zip(prompts, done, strict=True) if n]
    before = batch_of(cached)
    hidden = subject.draft.follow(before, main).hidden
    subject.draft.forward(shifted(before, [t for prompt, n in earlier for t in prompt[1 : n + 1]]), hidden, own)
    batch = batch_of(rest)
    hidden = subject.draft.follow(batch, main).hidden
    following = [t for prompt, n in zip(prompts, done, strict=True) for t in prompt[n + 1 :]]
    logits = subject.draft.forward(shifted(batch, following), hidden, own).logits
    for prompt, n, part in zip(prompts, done, logits.split([len(piece.tokens) for piece in rest]), strict=True):
        states = drafted(family, prompt, len(prompt))[0]
        assert (part - subject.dense(0).forward(states, prompt[1:])[0][n:]).abs().max() <= BAR


def test_guesses_that_were_not_taken_leave_no_trace(subject: Subject) -> None:
    """Rows of wrong tokens are written, then overwritten by the right ones; as after a rejected draft."""
    family, tokens, at = subject.family, random_tokens(51, 3), 40
    main, own = pools(family)
    blocks = range(family.layout.blocks_for(60))
    for first, end, wrong in ((0, at, False), (at, at + 5, True), (at, 50, False)):
        row_tokens = random_tokens(end - first, 9) if wrong else tokens[first:end]
        following = random_tokens(end - first, 10) if wrong else tokens[first + 1 : end + 1]
        batch = batch_of([Piece(row_tokens, first, blocks, 0)])
        hidden = subject.draft.follow(batch, main).hidden
        logits = subject.draft.forward(shifted(batch, following), hidden, own).logits
    states = drafted(family, tokens, 50)[0]
    assert (logits - subject.dense(0).forward(states, tokens[1:])[0][at:]).abs().max() <= BAR


def test_the_second_block_goes_on_from_the_first(subject: Subject) -> None:
    """Row t of depth 1 joins the first block's state of row t with token t + 2, in a cache of its own."""
    tokens = random_tokens(36, 4)
    main, own = pools(subject.family)
    batch = batch_of([Piece(tokens[:34], 0, range(3), 0)])
    hidden = subject.draft.follow(batch, main).hidden
    first = subject.draft.forward(shifted(batch, tokens[1:35]), hidden, own)
    second = subject.draft.forward(shifted(batch, tokens[2:36]), first.hidden, own, depth=1)
    behind = subject.dense(0).forward(hidden, tokens[1:35])[1]
    assert (second.logits - subject.dense(1).forward(behind, tokens[2:36])[0]).abs().max() <= BAR
    again = subject.draft.forward(shifted(batch, tokens[2:36]), first.hidden, own, depth=5)
    assert torch.equal(again.logits, second.logits)


def test_the_token_of_the_row_itself_instead_of_the_next_shows(subject: Subject) -> None:
    tokens = random_tokens(34, 5)
    hidden, logits, _ = drafted(subject.family, tokens, 33, shift=0)
    assert (logits - subject.dense(0).forward(hidden, tokens[1:])[0]).abs().max() > MISS


def test_swapped_norms_show(subject: Subject, tmp_path: Path) -> None:
    stored = load_file(subject.folder / "model.safetensors")
    swapped = dict(stored)
    for name in stored:
        if name.endswith("enorm.weight"):
            other = name.replace("enorm", "hnorm")
            swapped[name], swapped[other] = stored[other], stored[name]
    save_file(swapped, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((subject.folder / "config.json").read_bytes())
    tokens = random_tokens(34, 6)
    hidden, logits, _ = drafted(opened(tmp_path), tokens, 33)
    assert (logits - subject.dense(0).forward(hidden, tokens[1:])[0]).abs().max() > MISS


def test_states_of_other_rows_are_refused(subject: Subject) -> None:
    main, own = pools(subject.family)
    batch = batch_of([Piece([5, 6, 7], 0, range(1), 0)])
    hidden = subject.draft.follow(batch, main).hidden
    with pytest.raises(ValueError, match="2 hidden states for 3 rows"):
        subject.draft.forward(batch, hidden[:2], own)
    with pytest.raises(ValueError, match="depth"):
        subject.draft.forward(batch, hidden, own, depth=-1)
    with pytest.raises(ValueError, match="block_tables"):
        subject.draft.forward(batch_of([Piece([5, 6, 7], 0, (64,), 0)]), hidden, own)


def test_a_checkpoint_without_blocks_has_no_draft(tmp_path: Path) -> None:
    v4_tiny.write_tiny(tmp_path / "v4", v4_tiny.TinySpec(seed=1))
    mla_tiny.write_tiny(tmp_path / "v3", mla_tiny.TinySpec("v3"))
    assert [opened(tmp_path / name).draft for name in ("v4", "v3")] == [None, None]


def test_the_number_of_blocks_has_two_spellings(tmp_path: Path) -> None:
    write_mla("v3")(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["num_mtp_layers"] = config.pop("num_nextn_predict_layers")
    path.write_text(json.dumps(config), encoding="utf-8")
    draft = opened(tmp_path).draft
    assert draft is not None
    assert draft.blocks == MTP_BLOCKS
