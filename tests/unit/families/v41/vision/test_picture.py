"""Whatever bytes arrive, they become an RGB picture within the bounds or one error that names the image."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engine.errors import InvalidParameter
from engine.families.v41.vision.encoder import encode
from engine.families.v41.vision.picture import Bounds, decode
from tests.unit.families.v41.vision.material import encoder, image_bytes

BOUNDS = Bounds(file_bytes=2**20, pixels=2**20)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def refused(data: bytes, bounds: Bounds = BOUNDS) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        decode(data, bounds)
    assert caught.value.field == "image"
    assert caught.value.fix
    return caught.value


def claimed(width: int, height: int) -> bytes:
    """A PNG that says it is this large and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


MODES = {"PNG": ("RGB", "RGBA", "L", "LA", "P", "1"), "JPEG": ("RGB", "L", "CMYK"), "WEBP": ("RGB", "RGBA")}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_every_mode_of_every_format_becomes_rgb(kind: str, mode: str) -> None:
    image = Image.effect_noise((20, 10), 50).convert(mode)
    found = decode(file_of(image, kind), BOUNDS)
    assert (found.mode, found.size) == ("RGB", (20, 10))


def test_a_file_over_the_byte_bound_is_refused() -> None:
    assert "bytes are too many" in str(refused(b"x" * 101, Bounds(file_bytes=100)))


@pytest.mark.parametrize(("width", "height"), [(1025, 1024), (2**16, 2**16), (2**30, 2**30)])
def test_a_picture_over_the_pixel_bound_is_refused_by_its_header(width: int, height: int) -> None:
    assert "too many" in str(refused(claimed(width, height)))


def test_a_picture_at_the_bound_is_taken() -> None:
    image = Image.new("RGB", (32, 32))
    assert decode(file_of(image), Bounds(pixels=1024)).size == (32, 32)


@pytest.mark.parametrize(
    "data", [b"", b"GIF89a", b"<svg/>", b"\x89PNG\r\n\x1a\n", file_of(Image.new("RGB", (4, 4)), "BMP")]
)
def test_what_is_no_image_of_a_known_format_is_refused(data: bytes) -> None:
    refused(data)


def test_sixteen_bits_of_grey_are_refused_rather_than_cut_off() -> None:
    deep = Image.fromarray(np.full((4, 4), 60_000, np.uint16))
    assert "8 bits" in str(refused(file_of(deep)))


def test_a_file_cut_short_is_refused() -> None:
    whole = image_bytes(2)
    assert "cannot be decoded" in str(refused(whole[: len(whole) // 2]))


@given(st.data())
def test_damaged_files_are_refused_or_are_pictures(data: st.DataObject) -> None:
    damaged = bytearray(image_bytes(0))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode(bytes(damaged), BOUNDS)
    except InvalidParameter as error:
        assert error.field == "image"
    else:
        assert found.mode == "RGB"
        assert found.width * found.height <= BOUNDS.pixels


@pytest.mark.parametrize("size", [(1, 1), (1, 700), (700, 1), (3000, 2)])
def test_thin_and_tiny_pictures_are_encoded_or_refused(size: tuple[int, int]) -> None:
    found = encode(file_of(Image.effect_noise(size, 90)), encoder())
    assert 4 <= len(found.rows) == found.plan.tokens <= encoder().config.limits.max_tokens
    assert np.isfinite(found.rows).all()


@pytest.mark.parametrize("field", ["file_bytes", "pixels"])
def test_bounds_that_admit_nothing_are_refused(field: str) -> None:
    with pytest.raises(InvalidParameter, match=field):
        Bounds(**{field: 0})
