"""Image files to RGB pixels, within bounds that are checked before anything is unpacked. Knows formats, no model."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image

from engine.errors import InvalidParameter

FORMATS = ("PNG", "JPEG", "WEBP")
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # others would be cut off by a conversion
_SAVE_ANEW = "save the image again, as PNG, JPEG or WebP with 8 bits per channel"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest file and the largest picture that are taken; a picture costs four bytes of memory per pixel."""

    file_bytes: int = 32 * 2**20
    pixels: int = 64 * 2**20  # below the size at which Pillow warns of decompression bombs

    def __post_init__(self) -> None:
        for field in ("file_bytes", "pixels"):
            if getattr(self, field) < 1:
                raise InvalidParameter(field, f"{getattr(self, field)} admits no image", "use a positive number")


DEFAULT_BOUNDS = Bounds()


def decode(data: bytes, bounds: Bounds) -> Image.Image:
    """The first frame as RGB, as it is stored: orientation tags are not applied, transparency is dropped.

    Raises InvalidParameter naming `image` for a file or picture over the bounds (before it is unpacked), for another
    format, for more than 8 bits per channel, and for a damaged file.
    """
    if not data:
        raise InvalidParameter("image", "is empty", "send the bytes of an image file")
    if len(data) > bounds.file_bytes:
        raise InvalidParameter("image", f"{len(data)} bytes are too many", f"send at most {bounds.file_bytes}")
    image = _opened(data)
    if image.width * image.height > bounds.pixels:
        message = f"{image.width} x {image.height} pixels are too many"
        raise InvalidParameter("image", message, f"send at most {bounds.pixels} pixels")
    if image.mode not in _EIGHT_BITS:
        raise InvalidParameter("image", f"mode {image.mode} has more than 8 bits per channel", _SAVE_ANEW)
    try:
        return image.convert("RGB")
    except Exception as error:  # decoders raise whatever a damaged file makes them raise
        raise InvalidParameter("image", f"cannot be decoded: {error}", _SAVE_ANEW) from error


def _opened(data: bytes) -> Image.Image:
    """Reads the header alone."""
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidParameter("image", f"has too many pixels: {error}", "send a smaller one") from error
    except Exception as error:  # a damaged header fails in as many ways as there are formats
        raise InvalidParameter("image", f"is no readable {', '.join(FORMATS)} file", _SAVE_ANEW) from error
