"""How does an encoded image become pixels? Upright by its EXIF tag, of one size and one number of channels."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

__all__ = ["DeepImage", "decode_image", "holds_images"]


_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "JPEG2000", "PPM")
"""What is decoded. Pillow knows more, some of which start other programs (an EPS starts Ghostscript)."""

_DEEP_MODES = ("I", "F")
"""Pillow's modes of more than 8 bits a channel begin so; it cuts their values off at 0 and 255 when it converts them."""


class DeepImage(ValueError):
    """An image with more than 8 bits a channel, whose values would not survive."""


def holds_images(kind: pa.DataType) -> bool:
    """Whether the type is that of encoded images as Parquet files keep them: a struct with the field `bytes`."""
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def decode_image(
    content: bytes | memoryview,
    size: tuple[int, int] | None,
    mode: Literal["RGB", "L"],
    value_range: tuple[float, float] | None = None,
) -> np.ndarray:
    """Decode to uint8 [height, width, channels]; channels is 3 for RGB and 1 for L.

    Args:
        size: (height, width) in pixels to resize to, bilinear; None keeps the image's own.
        value_range: what becomes 0 and 255 of an image with more than 8 bits; values beyond are clipped.

    Raises:
        DeepImage: its pixels have more than 8 bits a channel, or are floats, and no range is given for them.
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: not an image, or a damaged one.
    """
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        if image.mode.startswith(_DEEP_MODES):
            if value_range is None:
                raise DeepImage(f"Pillow's mode {image.mode}: its pixels have more than 8 bits, or are floats")
            upright = _in_8_bits(ImageOps.exif_transpose(image), *value_range).convert(mode)
        else:
            upright = ImageOps.exif_transpose(image).convert(mode)
        if size is not None and upright.size != (size[1], size[0]):
            upright = upright.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        pixels = np.asarray(upright, np.uint8)
    return pixels.reshape(*pixels.shape[:2], -1)


def _in_8_bits(image: Image.Image, low: float, high: float) -> Image.Image:
    """A grey image of 8 bits: `low` and less is black, `high` and more is white."""
    values = np.asarray(image, np.float64)
    if np.isnan(values).any():
        raise ValueError("a pixel is NaN")
    scaled = (np.clip(values, low, high) - low) * (255.0 / (high - low))
    return Image.fromarray(np.rint(scaled).astype(np.uint8))
