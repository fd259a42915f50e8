"""Images of any size and kind become pixels as the pipeline file says; masks keep their classes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from penstock.errors import DataError, SpecError
from penstock.ingest.columns import images
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.open_feed import open_feed
from tests.ingest.preparing import Source, transform_table
from tests.ingest.reading import write_files


def encoded(pixels: np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format, **options)
    return buffer.getvalue()


def halves(height: int, width: int) -> np.ndarray:
    """Black on the left, white on the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, width // 2 :] = 255
    return pixels


def decoded(column: list[bytes], **options: Any) -> np.ndarray:
    table = pa.table({"image": pa.array(column, pa.binary())})
    made: np.ndarray = transform_table(table, [{"decode_image": options}])["image"].combine_chunks().to_numpy_ndarray()
    return made


@pytest.mark.parametrize("format", ["JPEG2000", "PPM"])
def test_an_image_of_another_format_is_refused(format: str) -> None:
    with pytest.raises(DataError, match="not a JPEG, PNG, BMP, WebP, TIFF or GIF image"):
        decoded([encoded(halves(8, 8), format)])


@pytest.mark.parametrize(("fit", "row"), [("resize", [0, 0, 255, 255]), ("crop", [0, 0, 255, 255]), ("pad", [0, 0, 255, 255])])
def test_image_fit_decides_size(fit: str, row: list[int]) -> None:
    # Four times as wide as high: cropped from the sides, padded above and below.
    image = decoded([encoded(halves(10, 40))], size=[4, 4], fit=fit, mode="L")[0, :, :, 0]
    assert image.shape == (4, 4)
    middle = image[1] if fit != "pad" else image[1:3].max(axis=0)
    assert (np.abs(middle.astype(int) - row) < 40).all()
    assert (image[[0, 3]] == 0).all() == (fit == "pad")
    tall = decoded([encoded(np.arange(40, dtype=np.uint8)[:, None].repeat(10, 1))], size=[10, 10], fit=fit, mode="L")[
        0, :, :, 0
    ]
    spread = int(tall[:, 5].max()) - int(tall[:, 5].min())
    assert spread < 12 if fit == "crop" else spread > 30


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(20, 31), (45, 60), (90, 130), (200, 170)])
def test_resized_image_is_within_one_of_pillow(mode: str, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(5)
    smooth = Image.fromarray(rng.integers(0, 256, (9, 13, 3), np.uint8)).resize((130, 90))
    expected = np.asarray(smooth.convert(mode).resize(size[::-1], Image.Resampling.BILINEAR)).reshape(*size, -1)
    found = decoded([encoded(np.asarray(smooth))], size=list(size), mode=mode)[0]
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_camera_picture_is_decoded_smaller(mode: str, orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    picture = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize((800, 600), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(np.asarray(picture), "JPEG", quality=95, exif=exif)
    lying = orientation == 6
    upright = picture.transpose(Image.Transpose.ROTATE_270) if lying else picture
    height, width = (70, 50) if lying else (50, 70)
    seen: list[tuple[int, int]] = []
    resized = images._resized
    monkeypatch.setattr(images, "_resized", lambda pixels, *to: (seen.append(pixels.shape[:2]), resized(pixels, *to))[1])
    found = decoded([content], size=[height, width], mode=mode)[0]
    # A quarter of each side is more than twice the size to come to; an eighth is not.
    assert seen == [(200, 150) if lying else (150, 200)]
    expected = np.asarray(upright.convert(mode).resize((width, height), Image.Resampling.BILINEAR)).reshape(height, width, -1)
    assert np.abs(found.astype(int) - expected).mean() < 1.5


def test_image_fit_defaults_to_data_images() -> None:
    table = pa.table({"image": [{"bytes": encoded(halves(10, 40)), "path": None}]})
    made = (
        transform_table(table, images={"size": [4, 4], "fit": "pad", "mode": "L"})["image"].combine_chunks().to_numpy_ndarray()
    )
    assert (made[0, [0, 3]] == 0).all()


def test_mask_resized_keeps_classes() -> None:
    classes = np.arange(64, dtype=np.uint8).reshape(8, 8)
    palette = Image.fromarray(classes, "P")
    palette.putpalette([255 - n // 3 for n in range(768)])
    held = io.BytesIO()
    palette.save(held, "PNG")
    two = encoded(np.eye(8, dtype=np.bool_))
    masks = decoded([held.getvalue(), encoded(classes), two], mode="mask")
    assert masks.dtype == np.uint8 and masks.shape == (3, 8, 8)
    assert np.array_equal(masks[0], classes) and np.array_equal(masks[1], classes) and np.array_equal(masks[2], np.eye(8))
    small = decoded([encoded(np.kron([[3, 200], [200, 9]], np.ones((9, 9))).astype(np.uint8))], mode="mask", size=[5, 5])
    assert set(np.unique(small)) == {3, 9, 200}
    with pytest.raises(DataError, match=r"a mask holds one number of 8 bits a pixel, and this is of Pillow's mode RGB"):
        decoded([encoded(halves(4, 4))], mode="mask")
    with pytest.raises(SpecError, match="not for a mask"):
        decoded([two], mode="mask", keep="encoded")


def test_image_label_is_mask_beside_images_of_any_size(tmp_path: Path) -> None:
    shapes = [(4, 6), (5, 3), (2, 2)]
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (*shape, 3), dtype=np.uint8) for shape in shapes]
    masks = [rng.integers(0, 5, (4, 4), dtype=np.uint8) for _ in shapes]
    rows = {
        "image": [{"bytes": encoded(image), "path": None} for image in images],
        "mask": [{"bytes": encoded(mask), "path": None} for mask in masks],
    }
    step = {"decode_image": {"keep": "sizes"}}
    source = Source.of(tmp_path, {"train/a.parquet": pa.table(rows)}, [step], label="mask")
    manifest: DatasetManifest = source.materialize()
    assert [str(column) for column in manifest.feed_schema.columns] == [
        "image: uint8[*]",
        "mask: uint8[4, 4]",
        "image_shape: int64[3]",
    ]
    feed = open_feed(f"{source.storage.root}/datasets/key", split="train", batch_rows=3, shuffle="none")
    batch = next(feed.batches(0)).columns
    for row, image in enumerate(images):
        start, end = batch["image_offsets"][row : row + 2]
        assert np.array_equal(batch["image"][start:end].reshape(tuple(batch["image_shape"][row])), image)
        assert np.array_equal(batch["mask"][row], masks[row])


def test_pages_and_previews_are_not_pictures() -> None:
    page, preview = Image.fromarray(halves(8, 8)), Image.fromarray(halves(2, 2))
    for second, refused in ((page, True), (preview, False)):
        held = io.BytesIO()
        page.save(held, "TIFF", save_all=True, append_images=[second])
        if refused:
            with pytest.raises(DataError, match="a TIFF of 2 pages of one size"):
                decoded([held.getvalue()])
        else:
            assert np.array_equal(decoded([held.getvalue()])[0], halves(8, 8))


def test_image_folders_take_webp_tiff_gif_not_eps(tmp_path: Path) -> None:
    pixels = halves(8, 8)
    names = {
        "a/1.webp": ("WEBP", {"lossless": True}),
        "a/2.tif": ("TIFF", {}),
        "b/3.tiff": ("TIFF", {}),
        "b/4.gif": ("GIF", {}),
    }
    files = {f"train/{name}": encoded(pixels, format, **options) for name, (format, options) in names.items()}
    source = Source.of(tmp_path, files, ["label_encoder"], format="images", label="label")
    assert source.materialize().rows["train"] == 4
    eps = io.BytesIO()
    Image.fromarray(pixels).save(eps, "EPS")
    write_files(tmp_path, {"train/b/5.gif": eps.getvalue()})
    with pytest.raises(DataError, match=r"5\.gif, row 0 \(from 0\): not a JPEG, PNG, BMP, WebP, TIFF or GIF image"):
        source.materialize()
