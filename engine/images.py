"""Images of a prompt: where their tokens stand and which embeddings replace them. Knows no pixels and no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engine.errors import InvalidParameter
from engine.prefix import ImageMark
from engine.sampling.params import is_integer

_DIGEST_BYTES = 32
_EXPONENT = 0x7F80  # of a bf16 number; all ones: not finite


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How a model takes images: the id of every position of a span, and the width of what stands there instead."""

    token: int
    width: int


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """One image in a prompt. `rows` may not change afterwards; equal digests promise equal rows.

    The digest is part of the key of the prefix block that the span starts in, and so of all that follow.
    """

    start: int  # position of its first token
    end: int  # one past its last
    rows: np.ndarray = field(compare=False, repr=False)  # [end - start, width] float32, or uint16: the bits of bf16
    digest: bytes  # 32 bytes, of the image and of the encoder that made the rows

    def floats(self, first: int, last: int) -> np.ndarray:
        """float32 [last - first, width]: the rows of prompt positions first .. last - 1, which are all the span's."""
        rows = self.rows[first - self.start : last - self.start]
        return rows if rows.dtype == np.float32 else (rows.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Embeddings that stand in a batch instead of its tokens' own."""

    at: np.ndarray  # int64 [images' rows] rows of the batch, ascending
    values: np.ndarray  # float32 [images' rows, width]


def rows_within(spans: Iterable[ImageSpan], first: int, last: int) -> list[tuple[int, np.ndarray]]:
    """What of `spans` stands at positions first .. last - 1: the first such position of each, and its rows."""
    cuts = ((max(span.start, first), min(span.end, last), span) for span in spans)
    return [(begin, span.floats(begin, end)) for begin, end, span in cuts if begin < end]


def marks(spans: Iterable[ImageSpan]) -> tuple[ImageMark, ...]:
    """The spans as prefix keys take them."""
    return tuple(ImageMark(span.start, span.digest) for span in spans)


def require_images(spans: tuple[ImageSpan, ...], prompt: tuple[int, ...], accepts: ImageInput | None) -> None:
    """Raise InvalidParameter, naming `images` or the field of one of them, unless `spans` fit the prompt and the model.

    Spans ascend and do not overlap; every position of one is an image token and has one finite row. Where there are
    spans, no image token stands outside of them: a prompt made for another number of rows is not guessed at.
    """
    if not isinstance(spans, tuple) or not all(isinstance(span, ImageSpan) for span in spans):
        raise InvalidParameter("images", "must be a tuple of spans", "send an ImageSpan for every image")
    if not spans:
        return
    if accepts is None:
        raise InvalidParameter("images", "this model takes text alone", "leave them out, or use a model with vision")
    free = 0
    for index, span in enumerate(spans):
        _require_place(f"images[{index}]", span, prompt, free, accepts.token)
        _require_rows(f"images[{index}]", span, accepts.width)
        free = span.end
    covered = {position for span in spans for position in range(span.start, span.end)}
    bare = next((at for at, token in enumerate(prompt) if token == accepts.token and at not in covered), None)
    if bare is not None:
        message = f"position {bare} holds the image token, and no image covers it"
        raise InvalidParameter("images", message, "send every image of the prompt, with a row for each of its tokens")


def _require_place(name: str, span: ImageSpan, prompt: tuple[int, ...], free: int, token: int) -> None:
    for field_name, value in (("start", span.start), ("end", span.end)):
        if not is_integer(value):
            raise InvalidParameter(f"{name}.{field_name}", f"{value!r} is not an integer", "send a position")
    if span.start < free:
        raise InvalidParameter(
            f"{name}.start", f"{span.start} is before {free}", "order images by position, without overlap"
        )
    if not span.start < span.end <= len(prompt):
        message, fix = f"{span.start} .. {span.end} is no range of the prompt", f"stay within its {len(prompt)} tokens"
        raise InvalidParameter(f"{name}.end", message, fix)
    other = next((at for at in range(span.start, span.end) if prompt[at] != token), None)
    if other is not None:
        message = f"position {other} holds token {prompt[other]}, not the image token"
        raise InvalidParameter(name, message, f"repeat token {token} for every row of the image")


def _require_rows(name: str, span: ImageSpan, width: int) -> None:
    rows, wanted = span.rows, (span.end - span.start, width)
    if not isinstance(rows, np.ndarray) or rows.dtype not in (np.float32, np.uint16) or rows.shape != wanted:
        found = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, np.ndarray) else type(rows).__name__
        message = f"{found}, not float32 (or uint16 for bf16) {list(wanted)}"
        raise InvalidParameter(f"{name}.rows", message, "send one embedding for every token of the image")
    finite = np.isfinite(rows) if rows.dtype == np.float32 else rows & _EXPONENT != _EXPONENT
    if not finite.all():
        raise InvalidParameter(f"{name}.rows", "holds NaN or infinity", "encode the image again")
    if not isinstance(span.digest, bytes) or len(span.digest) != _DIGEST_BYTES:
        message = f"is not {_DIGEST_BYTES} bytes"
        raise InvalidParameter(f"{name}.digest", message, "send the content hash that came with the embeddings")
