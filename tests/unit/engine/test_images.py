"""Images in a request: what does not fit the prompt or the model is refused by field, before any work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.batch import RaggedBatch
from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.images import ImageInput, ImageSpan, marks, rows_within
from engine.requests import DecodeRequest, GenerateRequest, PrefillRequest
from engine.sampling.params import SamplingState
from tests.support.driving import GREEDY, run
from tests.support.fakefamily import MODEL, FakeFamily, fake_engine

TOKEN, WIDTH = 7, 3
PROMPT = (2, 3, *[TOKEN] * 5, 4, *[TOKEN] * 13, 5, 6)
ROWS = np.arange(18 * WIDTH, dtype=np.float32).reshape(18, WIDTH)
FIRST = ImageSpan(2, 7, ROWS[:5], b"a" * 32)
SECOND = ImageSpan(8, 21, ROWS[5:], b"b" * 32)


def seeing_engine(batches: list[RaggedBatch], **config: int) -> Engine:
    """The fake family, said to take images; it looks at none."""
    engine = fake_engine(**config)
    model = replace(MODEL, image_input=ImageInput(TOKEN, WIDTH))
    return Engine(FakeFamily(batches.append), engine.pool, model, engine.config, clock=lambda: 0.0)


def refused(span: Any, **changes: Any) -> InvalidParameter:
    images = span if isinstance(span, tuple | list) else (replace(span, **changes),)
    with pytest.raises(InvalidParameter) as caught:
        seeing_engine([]).submit(GenerateRequest("r", PROMPT, GREEDY, images=images))
    assert caught.value.fix
    return caught.value


def with_nan(dtype: type) -> np.ndarray:
    rows = np.zeros((5, WIDTH), dtype)
    rows[3, 1] = np.nan if dtype is np.float32 else 0x7FC0
    return rows


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"start": "2"}, "images[0].start"),
        ({"start": -1}, "images[0].start"),
        ({"end": 2.5}, "images[0].end"),
        ({"end": 2}, "images[0].end"),
        ({"end": 24}, "images[0].end"),
        ({"start": 1, "end": 6}, "images[0]"),
        ({"start": 3, "end": 8}, "images[0]"),
        ({"end": 6}, "images[0].rows"),
        ({"rows": ROWS[:4]}, "images[0].rows"),
        ({"rows": ROWS[:5, :2]}, "images[0].rows"),
        ({"rows": ROWS[:5].astype(np.float64)}, "images[0].rows"),
        ({"rows": ROWS[:5].tolist()}, "images[0].rows"),
        ({"rows": with_nan(np.float32)}, "images[0].rows"),
        ({"rows": with_nan(np.uint16)}, "images[0].rows"),
        ({"digest": b"short"}, "images[0].digest"),
        ({"digest": "a" * 32}, "images[0].digest"),
    ],
)
def test_a_span_that_does_not_fit_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    assert refused(FIRST, **changes).field == field


def test_spans_out_of_order_or_overlapping_are_refused() -> None:
    assert refused((SECOND, FIRST)).field == "images[1].start"
    assert refused((FIRST, replace(FIRST, start=6, end=7, rows=ROWS[:1]))).field == "images[1].start"


@pytest.mark.parametrize("images", [(FIRST,), (SECOND,), (FIRST, replace(SECOND, end=20, rows=ROWS[6:]))])
def test_an_image_token_that_no_image_covers_is_refused(images: tuple[ImageSpan, ...]) -> None:
    """Three ways to count a prompt's images wrongly; without any image the token is a token like others."""
    assert refused(images).field == "images"
    seeing_engine([]).submit(GenerateRequest("r", PROMPT, GREEDY))


@pytest.mark.parametrize("images", [[FIRST], (FIRST.rows,), None])
def test_what_is_no_tuple_of_spans_is_refused(images: Any) -> None:
    with pytest.raises(InvalidParameter, match="images"):
        seeing_engine([]).submit(GenerateRequest("r", PROMPT, GREEDY, images=images))


def test_a_model_of_text_alone_refuses_images() -> None:
    with pytest.raises(InvalidParameter, match="text alone") as caught:
        fake_engine().submit(GenerateRequest("r", PROMPT, GREEDY, images=(FIRST,)))
    assert caught.value.field == "images"


def test_prefill_and_decode_requests_are_held_to_the_same() -> None:
    wrong, engine = (replace(FIRST, digest=b""),), seeing_engine([])
    with pytest.raises(InvalidParameter, match="digest"):
        engine.submit_prefill(PrefillRequest("r", PROMPT, GREEDY, images=wrong))
    engine.reserve("r", len(PROMPT), 40)
    with pytest.raises(InvalidParameter, match="digest"):
        engine.start_decode(DecodeRequest("r", PROMPT, (9,), GREEDY, SamplingState(0, 1), images=wrong))
    engine.release("r")
    engine.memory.check_idle()


@pytest.mark.parametrize("budget", [9, 10, 16, 64])
def test_every_row_reaches_the_batch_once_at_its_own_position(budget: int) -> None:
    batches: list[RaggedBatch] = []
    engine = seeing_engine(batches, max_batch_tokens=budget)
    engine.submit(GenerateRequest("other", (9, 9, 9), GREEDY))
    engine.submit(GenerateRequest("r", PROMPT, GREEDY, images=(FIRST, SECOND)))
    run(engine)
    placed: list[tuple[int, list[float]]] = []
    for batch in batches:
        if batch.images is not None:
            assert (batch.tokens[batch.images.at] == TOKEN).all()
            placed.extend(zip(batch.positions[batch.images.at].tolist(), batch.images.values.tolist(), strict=True))
    assert placed == list(zip([*range(2, 7), *range(8, 21)], ROWS.tolist(), strict=True))


def test_a_batch_without_image_rows_carries_none() -> None:
    batches: list[RaggedBatch] = []
    engine = seeing_engine(batches)
    engine.submit(GenerateRequest("r", (2, 3, 4), GREEDY))
    run(engine)
    assert [batch.images for batch in batches] == [None] * len(batches)


def test_bits_of_bf16_mean_the_numbers_they_stand_for() -> None:
    values = np.array([[1.0, -2.5, 0.0], [3.0e38, 2.0**-126, 0.15625]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    span = ImageSpan(4, 6, bits, b"c" * 32)
    rounded = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert np.array_equal(span.floats(4, 6), rounded)
    [(position, rows)] = rows_within((span,), 5, 99)
    assert position == 5
    assert np.array_equal(rows, rounded[1:])
    assert rows_within((span,), 0, 4) == rows_within((span,), 6, 9) == []


def test_the_prefix_keys_take_a_span_at_its_start() -> None:
    assert [(mark.position, mark.digest) for mark in marks((FIRST, SECOND))] == [(2, b"a" * 32), (8, b"b" * 32)]
