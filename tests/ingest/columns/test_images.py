"""Plain JPEG files have the pixels that Pillow gives them, whichever decoder they go through."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image, ImageOps

from penstock.ingest.columns import images
from penstock.ingest.columns.images import ImageMode, decode_image, pixel_bytes


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = rng.integers(-20, 20, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8)).convert(mode)


def jpeg(image: Image.Image, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "JPEG", **options)
    return content.getvalue()


def both(content: bytes, size: tuple[int, int] | None = None, mode: ImageMode = "RGB") -> tuple[np.ndarray, np.ndarray, int]:
    """The pixels, those without the quicker decoder, and how often that was asked."""
    with mock.patch("simplejpeg.decode_jpeg", wraps=images.simplejpeg.decode_jpeg) as decoder:
        found = decode_image(content, size, mode)
    with mock.patch.object(images, "_plain_jpeg", lambda *_: None):
        asked = sum("min_factor" not in call.kwargs for call in decoder.call_args_list)
        return found, decode_image(content, size, mode), asked


TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("quality", [20, 75, 98])
def test_colours(subsampling: int, progressive: bool, quality: int) -> None:
    for seed, shape in enumerate([(1, 1), (17, 33), (375, 500), (64, 7)]):
        content = jpeg(picture(*shape, seed=seed), subsampling=subsampling, progressive=progressive, quality=quality)
        for size in (None, (20, 24)):
            found, pillows, asked = both(content, size)
            assert found.dtype == np.uint8 and np.array_equal(found, pillows)
            assert asked == (size is None or shape != (375, 500))
            found[:] = 0  # writable
        assert pixel_bytes(content) == 4 * shape[0] * shape[1]


def test_grey() -> None:
    content = jpeg(picture(40, 50, "L"))
    found, pillows, asked = both(content, mode="L")
    assert found.shape == (40, 50, 1) and np.array_equal(found, pillows) and asked


@pytest.mark.parametrize(
    "content, mode",
    [
        (jpeg(picture(40, 50, "L")), "RGB"),
        (jpeg(picture(40, 50)), "L"),
        (jpeg(picture(40, 50, "CMYK")), "RGB"),
        (jpeg(picture(40, 50), keep_rgb=True), "RGB"),
        (jpeg(picture(40, 50), exif=TURNED), "RGB"),
        (jpeg(picture(40, 50), xmp=b'<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="6"/>'), "RGB"),
        (b"\xff\xd8\xff\xfe\0\x08\xff\xda\0\x0c\3\1" + jpeg(picture(40, 50), exif=TURNED)[2:], "RGB"),
        (b"\xff\xd8" + b"\xff" * 5 + jpeg(picture(40, 50), exif=TURNED)[2:], "RGB"),
    ],
    ids=[
        *("grey wanted in colour", "colour wanted in grey", "CMYK", "RGB", "turned by EXIF", "turned by XMP"),
        *("turned, behind a segment that looks like a scan", "turned, behind a gap"),
    ],
)
def test_what_takes_more_than_decoding_is_left_to_pillow(content: bytes, mode: ImageMode) -> None:
    found, pillows, asked = both(content, mode=mode)
    assert np.array_equal(found, pillows) and not asked


def test_the_word_exif_among_the_pixels_turns_nothing() -> None:
    content = jpeg(picture(200, 200))
    middle = len(content) // 2
    found, pillows, asked = both(content[:middle] + b"Exif" + content[middle + 4 :])
    assert np.array_equal(found, pillows) and not asked


def test_turned_pictures_are_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(jpeg(picture(40, 50), exif=exif), None, "RGB").shape == (50, 40, 3)


def odd_exif(kind: int = 3, orientation: bytes = b"\0\6\0\0") -> bytes:
    """Orientation 6 as a value of some type, and a resolution of -72, which is written as a number without sign."""
    turned = struct.pack(">HHI", 0x0112, kind, 1) + orientation
    return b"Exif\0\0MM\0*" + struct.pack(">IH", 8, 2) + turned + struct.pack(">HHIIIii", 0x011A, 10, 1, 38, 0, -72, 1)


@pytest.mark.parametrize("size", [None, (8, 8)])
def test_photo_with_odd_exif_is_upright(size: tuple[int, int] | None) -> None:
    content = jpeg(picture(40, 50), exif=odd_exif())
    with Image.open(io.BytesIO(content)) as image, pytest.raises(struct.error):
        ImageOps.exif_transpose(image, in_place=True)
    plain = jpeg(picture(40, 50), exif=TURNED)
    assert np.array_equal(decode_image(content, size, "RGB"), decode_image(plain, size, "RGB"))


@pytest.mark.parametrize(("kind", "value"), [(1, b"\6\0\0\0"), (2, b"6\0\0\0"), (7, b"\6\0\0\0")])
def test_orientation_of_other_type_turns_as_in_pillow(kind: int, value: bytes) -> None:
    content = jpeg(picture(400, 480), exif=odd_exif(kind, value))
    with Image.open(io.BytesIO(content)) as image:
        turned = (ImageOps.exif_transpose(image) or image).size
    assert decode_image(content, None, "RGB").shape[1::-1] == turned
    assert decode_image(content, (20, 24), "RGB").shape == (20, 24, 3)


@pytest.mark.parametrize("options", [{}, {"exif": TURNED}, {"progressive": True}], ids=["plain", "turned", "progressive"])
@pytest.mark.parametrize("size", [None, (20, 24)])
def test_jpeg_whose_data_end_early_is_damaged(options: dict[str, Any], size: tuple[int, int] | None) -> None:
    content = jpeg(picture(400, 480), **options)
    with pytest.raises(OSError, match="premature end of data"):
        decode_image(content[: len(content) // 2] + b"\xff\xd9", size, "RGB")
    padded = content[:-2] + bytes(40) + b"\xff\xd9"
    assert np.array_equal(decode_image(padded, size, "RGB"), decode_image(content, size, "RGB"))


def as_png(image: Image.Image, **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG", **options)
    return content.getvalue()


def test_png_with_a_flipped_bit_is_damaged() -> None:
    content = as_png(picture(40, 50))
    for from_end in (5, 13, 20, 40):  # the end mark, the checksum of the pixels, the pixels
        flipped = bytearray(content)
        flipped[-from_end] ^= 1
        with pytest.raises(OSError, match="PNG is damaged or ends early"):
            decode_image(bytes(flipped), None, "RGB")


def test_png_without_its_end_mark_is_refused() -> None:
    content = as_png(picture(40, 50))
    for missing in (5, 8, 9, 12, 16):
        with pytest.raises(OSError, match="PNG is damaged or ends early"):
            decode_image(memoryview(content)[:-missing], (20, 24), "RGB")


def test_whole_png_with_more_after_its_end_is_decoded() -> None:
    frame = picture(40, 50)
    animated = as_png(frame, save_all=True, append_images=[picture(40, 50, seed=1)])
    apart = as_png(frame, save_all=True, append_images=[picture(40, 50, seed=1)], default_image=True)
    for content in (as_png(frame) + bytes(200), animated, apart):
        assert np.array_equal(decode_image(content, None, "RGB"), np.asarray(frame))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_grey_mask_has_the_numbers_in_its_file(bits: int) -> None:
    numbers = np.arange(64).reshape(8, 8) % 2 ** min(bits, 3)
    packed = np.packbits((numbers[..., None] >> np.arange(bits)[::-1] & 1).astype(np.uint8).reshape(8, -1), axis=1)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)
    parts = [(b"IHDR", struct.pack(">IIBBBBB", 8, 8, bits, 0, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    assert np.array_equal(decode_image(png, None, "mask"), numbers)
    for photometric in (0, 1):  # white is 0, or black
        entries = [
            (256, 8),
            (257, 8),
            (258, bits),
            (259, 1),
            (262, photometric),
            (273, 134),
            (277, 1),
            (278, 8),
            (279, packed.size),
        ]
        head = (
            b"MM\0*"
            + struct.pack(">IH", 8, len(entries))
            + b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in entries)
        )
        tiff = head + bytes(134 - len(head)) + packed.tobytes()
        assert np.array_equal(decode_image(tiff, None, "mask"), numbers)


def test_a_picture_that_is_four_times_as_large_is_decoded_smaller() -> None:
    content = jpeg(picture(400, 480))
    for size, smaller in (((100, 120), True), ((101, 120), False)):
        found, pillows, asked = both(content, size)
        assert np.array_equal(found, pillows) and asked is not smaller


def test_damage_is_what_pillow_says_it_is() -> None:
    content = jpeg(picture(200, 200))
    with pytest.raises(OSError, match="truncated"):
        decode_image(content[: len(content) // 2], None, "RGB")
    broken = bytearray(content)
    broken[len(content) // 2 : len(content) // 2 + 40] = bytes(40)
    found, pillows, _ = both(bytes(broken))
    assert np.array_equal(found, pillows)
    for header in (3, 20, 200):
        assert pixel_bytes(content[:header]) in (0, 4 * 200 * 200)
        with pytest.raises((OSError, SyntaxError, ValueError)):
            decode_image(content[:header], None, "RGB")


def test_a_picture_of_too_many_pixels_is_refused() -> None:
    content = jpeg(picture(200, 200))
    with (
        mock.patch.object(images, "_MANY_PIXELS", 1000),
        mock.patch.object(Image, "MAX_IMAGE_PIXELS", 1000),
        pytest.raises(Image.DecompressionBombError),
    ):
        decode_image(content, None, "RGB")
