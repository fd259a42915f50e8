"""How do the values of an image with more than 8 bits a channel come to 8 bits?

Of colours of 16 bits Pillow keeps the high byte of each only. A second reading, with the bytes in the other order,
keeps the low ones.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from penstock.ingest.columns.images import DEEP_MODES, upright

__all__ = ["in_8_bits"]

_TIFF_PLANES = 284
"""Tag of a TIFF: whether channels are stored pixel by pixel (1) or one after the other (2)."""

_OTHER_BYTES = {
    "LA;16B": "RGBA",  # the four bytes of a pixel as they are: the low one of grey is the second
    **{
        f"{colors};16{order}": f"{colors};16{other}"
        for colors in ("RGB", "RGBX", "RGBA")
        for order, other in (("B", "L"), ("L", "B"), ("N", "B" if sys.byteorder == "little" else "L"))
    },
}
"""Pillow's names for the order of the bytes of deep colours, and those under which it keeps the bytes that it leaves out."""


def in_8_bits(image: ImageFile.ImageFile, content: bytes | memoryview, low: float, high: float) -> Image.Image:
    """Return a deep image, upright, as grey or colour of 8 bits: `low` and less is 0, `high` and more is 255.

    Raises:
        ValueError: Pillow does not read its layout, or a pixel is NaN.
    """
    values = _deep_values(image, content)
    if values.dtype == np.uint16:
        return Image.fromarray(_scaled(np.arange(2**16), low, high)[values])
    if np.isnan(values).any():
        raise ValueError("a pixel is NaN")
    return Image.fromarray(_scaled(values, low, high))


def _deep_values(image: ImageFile.ImageFile, content: bytes | memoryview) -> np.ndarray:
    """Return the numbers in a deep image's file, upright and without alpha: [height, width], of colours [height, width, 3].

    uint16 of an image of 16 bits, else int32 or float32.

    Raises:
        ValueError: Pillow does not read their layout.
    """
    if image.mode.startswith(DEEP_MODES):
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


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    scaled = (np.clip(values.astype(np.float64), low, high) - low) * (255.0 / (high - low))
    return np.rint(scaled).astype(np.uint8)


def _byte_layout(image: ImageFile.ImageFile) -> str:
    args = image.tile[0].args
    return str(args[0] if isinstance(args, tuple) else args)
