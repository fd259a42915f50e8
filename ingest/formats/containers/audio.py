"""How does a sound file become a row? Its samples as a list of numbers, with its class folder and rate."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import read_bytes
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.images import ImageReader
from penstock.ingest.formats.reader import FileFacts, library, reading
from penstock.ingest.spec import DataSpec

__all__ = ["AudioFormat", "AudioReader"]

_UNKNOWN_SIZE = 0x7FFFFF00

_COLUMNS = {"audio": pa.large_list(pa.float32()), "sample_rate": pa.int32(), "label": pa.string(), "path": pa.string()}


class AudioFormat(Format):
    """One sound a file (WAV, FLAC, Ogg), in folders named after their classes.

    Column `audio` holds its samples, float32 from -1 to 1, of several channels their mean, `sample_rate` how many a second has,
    `path` its name, and `label` the name of the first folder below the root. Files differ in length: the transform `ragged`.
    """

    extensions = (".wav", ".flac", ".ogg")
    libraries = ("soundfile",)
    folder_columns = False
    identity = ("audio",)
    not_features = ("path",)

    def reader(self, data: DataSpec, options: None) -> AudioReader:
        """Read a file a row."""
        return AudioReader(data)


class AudioReader(ImageReader):
    """One row per sound file, with the class and the path of an image."""

    inspects_rows = True

    def inspect(self, file: SourceFile) -> FileFacts:
        """Decode the file, which alone shows that it is whole."""
        samples, _ = self._samples(file)
        return super().inspect(file)._replace(columns=_COLUMNS, row_bytes=samples.nbytes)

    def content(self, file: SourceFile, names: Collection[str]) -> dict[str, Any]:
        """Return the samples of the row, and how many a second has, if either is among the columns to read."""
        columns = "audio", "sample_rate"
        return dict(zip(columns, self._samples(file), strict=True)) if {*columns} & {*names} else {}

    def _samples(self, file: SourceFile) -> tuple[np.ndarray, int]:
        soundfile = library("soundfile", "audio", "audio")
        content = read_bytes(file.uri)
        with reading(file, "sound"), soundfile.SoundFile(io.BytesIO(content)) as sound:
            frames = sound.read(dtype="float32", always_2d=True)
            rate, missing = int(sound.samplerate), sound.frames - len(frames)
        if missing or not len(frames) or (lacking := _bytes_missing(content)):
            lack = f"{lacking} bytes" if not missing and len(frames) else f"{missing} of its samples"
            raise DataError(f"{file.uri}: cut off, or empty: {lack} are missing", next_step="fetch it again")
        return frames.mean(axis=1, dtype=np.float64).astype(np.float32), rate


def _bytes_missing(content: bytes) -> int:
    """Return how many bytes of samples a WAV file lacks by its header, which libsndfile corrects by the file's size."""
    at, large = 12, 0
    while content[:4] in (b"RIFF", b"RF64") and at + 8 <= len(content):
        kind, size = content[at : at + 4], int.from_bytes(content[at + 4 : at + 8], "little")
        if kind == b"ds64":  # RF64, for more than 4 GB, has the size of its samples here
            large = int.from_bytes(content[at + 16 : at + 24], "little")
        if kind == b"data":  # one written to a pipe has a size of about 2 or 4 GB
            return max(0, at + 8 + (large or size) - len(content)) if large or size < _UNKNOWN_SIZE else 0
        at += 8 + size + size % 2
    return 0
