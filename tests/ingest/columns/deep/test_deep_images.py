"""Images with more than 8 bits a channel, whose values become those of 8 bits by a range."""

from __future__ import annotations

import re
import struct
import zlib

import numpy as np
import pytest

from penstock.errors import DataError
from penstock.ingest.columns import images
from tests.ingest.preprocess.transforms.test_images import decoded, encoded, halves


def png_of_16_bits(pixels: np.ndarray, kind: int) -> bytes:
    """Of values [height, width, channels], which Pillow does not write; kind 2 is RGB, 4 grey with alpha, 6 RGB with alpha."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, kind, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def tiff_of_16_bits(pixels: np.ndarray, order: str = "<", *, deflated: bool = False, kind: int = 2, planes: int = 1) -> bytes:
    """Of values [height, width, channels], of which the fourth is alpha; kind 2 is RGB, 5 CMYK."""
    height, width, channels = pixels.shape
    data = pixels.astype(f"{order}u2").tobytes()
    data = zlib.compress(data) if deflated else data
    bits = struct.pack(f"{order}{channels}H", *[16] * channels)
    tags = [(256, width), (257, height), (258, 0), (259, 8 if deflated else 1), (262, kind), (273, 0), (277, channels)]
    tags += [(278, height), (279, len(data)), (284, planes), *([(338, 2)] if channels == 4 and kind == 2 else [])]
    begins = 8 + 2 + 12 * len(tags) + 4
    values = dict(tags) | {258: begins, 273: begins + len(bits)}
    entries = [
        struct.pack(f"{order}HHII", tag, 3, channels, values[tag])
        if tag == 258
        else struct.pack(f"{order}HHII", tag, 4, 1, values[tag])
        for tag, _ in tags
    ]
    head = ("II" if order == "<" else "MM").encode() + struct.pack(f"{order}HIH", 42, 8, len(tags))
    return head + b"".join(entries) + bytes(4) + bits + data


DEEP = np.random.default_rng(7).integers(0, 4096, (5, 6, 4))
DEEP_COLORS = {
    "PNG RGB": png_of_16_bits(DEEP[..., :3], 2),
    "PNG RGBA": png_of_16_bits(DEEP, 6),
    "PNG grey and alpha": png_of_16_bits(DEEP[..., [0, 3]], 4),
    "TIFF RGB": tiff_of_16_bits(DEEP[..., :3]),
    "TIFF RGBA, big end first": tiff_of_16_bits(DEEP, ">"),
    "TIFF RGB, deflated": tiff_of_16_bits(DEEP[..., :3], deflated=True),
    "TIFF RGBA, deflated, big end first": tiff_of_16_bits(DEEP, ">", deflated=True),
}


@pytest.mark.parametrize("kind", DEEP_COLORS)
def test_16_bit_colours_keep_low_bytes(kind: str) -> None:
    colors = np.rint(DEEP[..., [0, 0, 0] if "grey" in kind else [0, 1, 2]] * (255 / 4095))
    assert np.array_equal(decoded([DEEP_COLORS[kind]], range=[0, 4095])[0], colors)
    with pytest.raises(DataError, match=r"mode RGBA?: its pixels have more than 8 bits a channel.*\n.*range: \[0, 65535\]"):
        decoded([DEEP_COLORS[kind]])
    assert images.pixel_bytes(DEEP_COLORS[kind]) == 4 * images.pixel_bytes(encoded(halves(5, 6)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tiff_of_16_bits(DEEP, kind=5), "colours of 16 bits of the kind CMYK;16L: write them as RGB"),
        (tiff_of_16_bits(DEEP[..., :3], planes=2), "colours of 16 bits of the kind R, in planes: write them as RGB"),
    ],
)
def test_deep_images_changed_by_pillow_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        decoded([content], range=[0, 4095])


def test_grey_of_32_bits_is_read_as_it_is() -> None:
    grey = np.rint(DEEP[..., 0] * (255 / 4095))
    content = encoded(DEEP[..., 0].astype(np.int32), "TIFF")
    assert np.array_equal(decoded([content], range=[0, 4095], mode="L")[0, ..., 0], grey)
