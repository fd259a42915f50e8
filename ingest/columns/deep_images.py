"""How do the values of an image with more than 8 bits a channel come to 8 bits?

Of colours of 16 bits Pillow keeps the high byte of each only. A second reading, with the bytes in the other order,
keeps the low ones.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageFile

__all__ = ["DeepImage", "deep_values", "in_8_bits", "is_deep", "upright"]


_DEEP_MODES = ("I", "F")
"""Pillow's modes of more than 8 bits a channel begin so; it cuts their values off at 0 and 255 when it converts them."""

_PNG_BITS_AT = 24
"""Where a PNG holds the number of bits of a channel."""

_TIFF_BITS, _TIFF_PLANES = 258, 284
"""Tags of a TIFF: the bits of each channel; whether channels are stored pixel by pixel (1) or one after the other (2)."""

_OTHER_BYTES = {
    "LA;16B": "RGBA",  # the four bytes of a pixel as they are: the low one of grey is the second
    **{
        f"{colors};16{order}": f"{colors};16{other}"
        for colors in ("RGB", "RGBX", "RGBA")
        for order, other in (("B", "L"), ("L", "B"), ("N", "B" if sys.byteorder == "little" else "L"))
    },
}
"""Pillow's names for the order of the bytes of deep colours, and those under which it keeps the bytes that it leaves out."""


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By the number of the orientation in EXIF; 1 is upright."""


class DeepImage(ValueError):
    """An image with more than 8 bits a channel, whose values would not survive."""


def is_deep(image: ImageFile.ImageFile, content: bytes | memoryview) -> bool:
    """Whether an image that is open, and not loaded, has more than 8 bits a channel by the header of its file."""
    if image.mode.startswith(_DEEP_MODES):
        return True
    if image.format == "PNG":
        return content[_PNG_BITS_AT] > 8
    bits: Any = getattr(image, "tag_v2", {}).get(_TIFF_BITS, (1,))
    return max(bits) > 8


def deep_values(image: ImageFile.ImageFile, content: bytes | memoryview) -> np.ndarray:
    """Return the numbers in a deep image's file, upright and without alpha: [height, width], of colours [height, width, 3].

    uint16 of an image of 16 bits, else int32 or float32.

    Raises:
        ValueError: Pillow does not read their layout.
    """
    if image.mode.startswith(_DEEP_MODES):
        return np.asarray(upright(image))
    layout = _byte_layout(image)
    planes: Any = getattr(image, "tag_v2", {}).get(_TIFF_PLANES, 1)
    if layout not in _OTHER_BYTES or planes != 1:
        raise ValueError(f"colours of 16 bits of the kind {layout}{', in planes' if planes != 1 else ''}: write them as RGB")
    with Image.open(io.BytesIO(content), formats=(str(image.format),)) as again:
        again.tile = [
            tile._replace(args=(_OTHER_BYTES[layout], *tile.args[1:]) if isinstance(tile.args, tuple) else _OTHER_BYTES[layout])
            for tile in again.tile
        ]
        low = np.asarray(upright(again))
    is_grey = layout.startswith("LA")
    values = np.asarray(upright(image))[..., 0 if is_grey else slice(3)].astype(np.uint16)
    values <<= 8
    values |= low[..., 1 if is_grey else slice(3)]
    return values


def upright(image: Image.Image) -> Image.Image:
    """Turn an image by its orientation alone. Pillow's function also writes the EXIF anew, which fails for odd values."""
    image.load()
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image if turn is None else image.transpose(turn)


def in_8_bits(values: np.ndarray, low: float, high: float) -> Image.Image:
    """Grey or colour of 8 bits: `low` and less is 0, `high` and more is 255."""
    if values.dtype == np.uint16:
        return Image.fromarray(_scaled(np.arange(2**16), low, high)[values])
    if np.isnan(values).any():
        raise ValueError("a pixel is NaN")
    return Image.fromarray(_scaled(values, low, high))


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    scaled = (np.clip(values.astype(np.float64), low, high) - low) * (255.0 / (high - low))
    return np.rint(scaled).astype(np.uint8)


def _byte_layout(image: ImageFile.ImageFile) -> str:
    args = image.tile[0].args
    return str(args[0] if isinstance(args, tuple) else args)
