"""Prompts of text and images give the reference logits however they are cut, cached, preempted or handed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import RaggedBatch
from engine.cache.pool import CachePool
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Finished, Preempted
from engine.families.v41.model import V41
from engine.families.v41.options import Options
from engine.families.v41.vision.encoder import encode
from engine.images import ImageRows, ImageSpan
from engine.model import ModelInfo
from engine.requests import GenerateRequest, PrefillRequest
from engine.sampling.params import SamplingParams
from tests.support.driving import handoff, of, replayed, run, tokens_of
from tests.support.replays import replaying
from tests.support.tiny import Piece, batch_of, fresh_pool, random_tokens
from tests.unit.families.v41.material import DATA, larger, opened, tensors
from tests.unit.families.v41.vision.material import Tensors, encoder, image_bytes, reference

BAR = 1e-3
IMAGE = 511
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Recording:
    """A family that keeps the logits of every position it computed, as of the last time."""

    def __init__(self, family: V41) -> None:
        self.family = family
        self.logits: dict[int, torch.Tensor] = {}

    def forward(self, batch: RaggedBatch, cache: CachePool) -> torch.Tensor:
        upper = np.zeros(batch.sequences) if batch.replay is None else batch.replay.upper
        rows = np.flatnonzero(batch.positions >= np.repeat(upper, np.diff(batch.starts)))  # others have no logits
        logits = self.family.forward(replace(batch, logit_rows=rows), cache)
        self.logits.update(zip(batch.positions[rows].tolist(), logits, strict=True))
        return logits[torch.from_numpy(np.searchsorted(rows, batch.logit_rows))]

    def of(self, tokens: Sequence[int], first: int = 0) -> torch.Tensor:
        return torch.stack([self.logits[position] for position in range(first, len(tokens))])


def spans_of(tokens: Sequence[int], rows: Sequence[np.ndarray], digests: Sequence[bytes]) -> tuple[ImageSpan, ...]:
    """Spans for `rows` where the image token stands, one after the other."""
    spans, at = [], 0
    for values, digest in zip(rows, digests, strict=True):
        while tokens[at] != IMAGE:
            at += 1
        spans.append(ImageSpan(at, at + len(values), values, digest))
        at += len(values)
    return tuple(spans)


def with_images(*parts: int | str) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """A prompt of that many random tokens, and of images by number."""
    tokens: list[int] = []
    numbers = [int(part) for part in parts if isinstance(part, str)]
    for part in parts:
        rows = reference()[f"span_{part}"] if isinstance(part, str) else None
        tokens.extend(random_tokens(part, part, IMAGE) if isinstance(part, int) else [IMAGE] * len(rows))
    rows = [reference()[f"span_{number}"].numpy() for number in numbers]
    return tuple(tokens), spans_of(tokens, rows, [bytes([number + 1]) * 32 for number in numbers])


def whole(family: V41, tokens: Sequence[int], spans: Sequence[ImageSpan], chunk: int = 10**6) -> torch.Tensor:
    """Logits of every token, computed without an engine, `chunk` tokens at a time."""
    pool, logits = fresh_pool(family), []
    blocks = range(family.layout.blocks_for(len(tokens)))
    for first in range(0, len(tokens), chunk):
        batch = batch_of([Piece(tokens[first : first + chunk], first, blocks, 0)])
        logits.append(family.forward(replace(batch, images=placed(spans, first, first + chunk)), pool))
    return torch.cat(logits)


def placed(spans: Sequence[ImageSpan], first: int, last: int) -> ImageRows | None:
    """The spans' rows at positions first .. last - 1, for a batch that starts at the first of them."""
    at = np.concatenate([np.arange(span.start, span.end) for span in spans])
    rows = np.concatenate([span.rows for span in spans])
    here = (at >= first) & (at < last)
    return ImageRows(at[here] - first, rows[here]) if here.any() else None


def engine_over(family: V41, blocks: int = 64, **config: int) -> tuple[Engine, Recording]:
    recording = Recording(family)
    facts = (family.vocab_size, family.max_context_tokens, family.eos_token_ids, family.layout, family.image_input)
    settings = EngineConfig(DATA, **{"max_batch_tokens": 33, "max_sequences": 4, "anchor_every_blocks": 1, **config})
    pool = CachePool(family.layout, blocks, 24, torch.float32)
    return Engine(recording, pool, ModelInfo("tiny", "r", family.name, *facts), settings), recording


@pytest.fixture(scope="module")
def stored() -> V41:
    return opened(DATA / "tiny-q")


@pytest.fixture(scope="module")
def tiny() -> dict[str, V41]:
    return {kernels: opened(larger() / "v41-tiny", kernels) for kernels in ("cpu", "reference")}


@pytest.fixture(scope="module")
def wanted() -> Tensors:
    return tensors(larger() / "v41-vision-tiny" / "text-image-logits.safetensors")


def case(wanted: Tensors, index: int) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    tokens, numbers = tuple(wanted[f"ids_{index}"].tolist()), wanted[f"images_{index}"].tolist()
    rows = [reference()[f"span_{number}"].numpy() for number in numbers]
    return tokens, spans_of(tokens, rows, [bytes([number + 1]) * 32 for number in numbers])


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(
    ("kernels", "chunk"), [*(("cpu", chunk) for chunk in (1000, 1, 3, 7, 16)), ("reference", 1000), ("reference", 13)]
)
def test_logits_and_engram_rows_equal_the_reference(
    index: int, kernels: str, chunk: int, tiny: dict[str, V41], wanted: Tensors
) -> None:
    family, rows = tiny[kernels], []
    family.probe = lambda what, layer, value: rows.append(value) if what == "engram rows" else None
    found = whole(family, *case(wanted, index), chunk)
    assert (found - wanted[f"logits0_{index}"]).abs().max() <= BAR
    assert torch.equal(torch.cat(rows), wanted[f"engram_rows_{index}"])


@pytest.mark.parametrize("index", range(4))
def test_files_through_encoder_and_engine_give_the_reference_logits(
    index: int, tiny: dict[str, V41], wanted: Tensors
) -> None:
    """Nothing of the reference but its answer: image files in, logits out, in chunks that cut the spans."""
    tokens = tuple(wanted[f"ids_{index}"].tolist())
    images = [encode(image_bytes(number), encoder()) for number in wanted[f"images_{index}"].tolist()]
    spans = spans_of(tokens, [image.rows for image in images], [image.digest for image in images])
    engine, recording = engine_over(tiny["cpu"], max_batch_tokens=17)
    ask(engine, tokens, spans)
    assert (recording.of(tokens) - wanted[f"logits0_{index}"]).abs().max() <= BAR


def ask(
    engine: Engine, tokens: tuple[int, ...], spans: tuple[ImageSpan, ...], **fields: object
) -> tuple[list[int], int]:
    """The answer, and how many prompt tokens came from the cache."""
    engine.submit(GenerateRequest("r", tokens, GREEDY, images=spans, **fields))
    events = run(engine)
    return tokens_of(events, "r"), of(events, Finished)[0].usage.cached_tokens


@pytest.mark.parametrize("parts", [(20, "2", 5, "0", 30), ("1", "5", 40), (3, "4")])
@pytest.mark.parametrize("budget", [5, 17, 33, 512])
def test_an_engine_computes_what_one_forward_does(parts: tuple[int | str, ...], budget: int, stored: V41) -> None:
    tokens, spans = with_images(*parts)
    engine, recording = engine_over(stored, max_batch_tokens=budget)
    ask(engine, tokens, spans)
    assert torch.equal(recording.of(tokens), whole(stored, tokens, spans))


def test_images_matter_and_so_does_their_order(stored: V41) -> None:
    """Control for the test above: other rows in the same places give other logits from there on (both begin alike)."""
    tokens, (one, two) = with_images(20, "2", "3", 30)
    swapped = (replace(one, rows=two.rows), replace(two, rows=one.rows))
    found, others = whole(stored, tokens, (one, two)), whole(stored, tokens, swapped)
    assert torch.equal(found[: one.start + 1], others[: one.start + 1])
    assert (found - others)[one.start + 1 :].abs().amax(1).min() > BAR


@pytest.mark.parametrize(("parts", "hit"), [((20, "2", 9), 48), (("1", "2", 1), 32), ((20, "2", 5, "0", 13), 80)])
def test_a_prefix_hit_that_ends_in_or_after_an_image_changes_no_bit(
    parts: tuple[int | str, ...], hit: int, stored: V41
) -> None:
    """Blocks hold 16 tokens, so the first two hits end within image 2."""
    engine, recording = engine_over(stored)
    tokens, spans = with_images(*parts)
    ask(engine, (*tokens, *random_tokens(40, 1, IMAGE)), spans)
    recording.logits.clear()
    longer = (*tokens, *random_tokens(21, 2, IMAGE))
    _, cached = ask(engine, longer, spans)
    assert cached == hit
    assert min(recording.logits) == hit
    assert torch.equal(recording.of(longer, hit), whole(stored, longer, spans)[hit:])


def test_an_image_of_other_content_shares_only_what_precedes_it(stored: V41) -> None:
    """Images 2 and 3 take as many tokens, so both prompts have the same ids."""
    (tokens, first), (same, second) = with_images(20, "2", 40), with_images(20, "3", 40)
    assert tokens == same
    engine, recording = engine_over(stored)
    ask(engine, tokens, first)
    _, cached = ask(engine, tokens, second)
    assert cached == 16, "the block before the image"
    assert torch.equal(recording.of(tokens, 16), whole(stored, tokens, second)[16:])
    assert ask(engine, tokens, ())[1] == 16, "image tokens without an image are yet another prompt"
    assert ask(engine, tokens, first)[1] == ask(engine, tokens, second)[1] == 80


def test_two_prompts_without_room_for_both_are_preempted_and_keep_their_images(stored: V41) -> None:
    prompts = {"a": with_images(20, "2", 38), "b": with_images(9, "3", 50)}
    long = replace(GREEDY, max_tokens=40)
    alone = {}
    for name, (tokens, spans) in prompts.items():
        engine, _ = engine_over(stored)
        engine.submit(GenerateRequest(name, tokens, long, images=spans))
        alone[name] = tokens_of(run(engine), name)
    engine, _ = engine_over(stored, blocks=13)
    for name, (tokens, spans) in prompts.items():
        engine.submit(GenerateRequest(name, tokens, long, images=spans, cache=False))
    events = run(engine)
    assert of(events, Preempted)
    assert {name: tokens_of(events, name) for name in prompts} == alone


def test_a_decode_that_is_preempted_computes_its_images_again(stored: V41) -> None:
    """Prefill here, decode there: decode needs the images only now, and has them in its request."""
    long = replace(GREEDY, max_tokens=40)
    prompts = {"a": with_images(20, "2", 38), "b": with_images(9, "3", 50)}
    source, target = engine_over(stored)[0], engine_over(stored, blocks=13)[0]
    firsts = {}
    for name, (tokens, spans) in prompts.items():
        request = PrefillRequest(name, tokens, long, cache=False, images=spans)
        firsts[name] = handoff(source, target, request)[0].token
    events = run(target)
    assert of(events, Preempted)
    for name, (tokens, spans) in prompts.items():
        engine, _ = engine_over(stored)
        engine.submit(GenerateRequest(name, tokens, long, images=spans))
        assert [firsts[name], *tokens_of(events, name)] == tokens_of(run(engine), name)


def replay_of(family: V41, tokens: Sequence[int], spans: Sequence[ImageSpan], hit: int, start: int) -> torch.Tensor:
    """By its definition: logits of rows from `start` on, computed at once over entries of a whole run below `hit`."""
    pool, blocks = fresh_pool(family), range(family.layout.blocks_for(len(tokens)))
    pieces = ((0, 0, 0), (start, hit, 1))
    logits = torch.empty(0)
    for first, held, slot in pieces:
        batch = replaying(batch_of([Piece(tokens[first:], first, blocks, slot)]), tokens, held)
        logits = family.forward(replace(batch, images=placed(spans, first, len(tokens))), pool)
    return logits


@pytest.mark.parametrize(("parts", "hit"), [((20, "2", 9), 48), (("1", 20), 32), (("1", "2", 12), 48)])
@pytest.mark.parametrize("budget", [7, 64])
def test_a_replayed_window_takes_its_images_and_no_ngram_reaches_across_one(
    parts: tuple[int | str, ...], hit: int, budget: int
) -> None:
    """Windows hold 16 tokens: the replay starts within an image, right after one, and within one of two."""
    family = opened(DATA / "tiny-q", options=Options(encoder_replay=True))
    engine, recording = engine_over(family, max_batch_tokens=budget)
    tokens, spans = with_images(*parts)
    ask(engine, (*tokens, *random_tokens(40, 1, IMAGE)), spans)
    recording.logits.clear()
    longer = (*tokens, *random_tokens(21, 2, IMAGE))
    assert ask(engine, longer, spans)[1] == hit - family.config.window
    assert min(recording.logits) == hit - family.config.window
    assert torch.equal(recording.of(longer, hit - 16), replay_of(family, longer, spans, hit, hit - 16))


def test_a_decode_that_replays_the_last_window_takes_its_images() -> None:
    """Prefill pushes entries alone; what stands in the last window comes with the decode request."""
    family = opened(DATA / "tiny-q", options=Options(handoff_replay=True))
    (source, _), (target, recording) = engine_over(family), engine_over(family)
    tokens, spans = with_images(20, "2", 5)
    replayed(source, target, tokens, GREEDY, images=spans)
    size = len(tokens)
    wanted = replay_of(family, tokens, spans, size, size - family.config.window)
    assert torch.equal(recording.of(tokens, size - 1), wanted[-1:])
