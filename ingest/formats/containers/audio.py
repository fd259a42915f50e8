"""How does a sound file become a row? Its samples as a list of numbers, with its class folder and rate."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import PositiveInt

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import read_bytes
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.images import class_of, refuse_without_class
from penstock.ingest.formats.reader import FileFacts, Reader, library, reading
from penstock.ingest.spec import DataSpec

__all__ = ["AudioFormat", "AudioOptions", "AudioReader"]

_UNKNOWN_SIZE = 0x7FFFFF00

_COLUMNS = {"audio": pa.large_list(pa.float32()), "sample_rate": pa.int32(), "label": pa.string(), "path": pa.string()}


class AudioOptions(Section):
    """How sound files become numbers.

    A row is a file: column `audio` holds its samples, float32 from -1 to 1, `sample_rate` how many a second has, `path` its
    name, and `label` the name of the first folder below the root. Files differ in length: `ragged: {columns: [audio]}`.
    """

    channels: Literal["mean", "first"] = "mean"
    """What becomes of several channels: their mean, or the first one alone."""
    sample_rate: PositiveInt | None = None
    """Refuse files of another rate; without it they may differ. Nothing is resampled."""


class AudioFormat(Format):
    """One sound a file (WAV, FLAC, Ogg), in folders named after their classes."""

    extensions = (".wav", ".flac", ".ogg")
    libraries = ("soundfile",)
    Options = AudioOptions
    folder_columns = False
    identity = ("audio",)
    not_features = ("path",)

    def reader(self, data: DataSpec, options: AudioOptions) -> AudioReader:
        """Read a file a row."""
        return AudioReader(data, options)


class AudioReader(Reader):
    """One row per sound file."""

    one_row_per_file = True
    in_name = frozenset({"label", "path"})

    def __init__(self, data: DataSpec, options: AudioOptions) -> None:
        self._needs_class, self._options = data.label == "label", options

    def inspect(self, file: SourceFile) -> FileFacts:
        """Decode the file, which alone shows that it is whole."""
        samples, _ = self._samples(file)
        if self._needs_class:
            refuse_without_class(file)
        return FileFacts(_COLUMNS, 1, row_bytes=samples.nbytes)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the one row."""
        row = {"label": class_of(file), "path": file.name}
        if {"audio", "sample_rate"} & {*schema.names}:
            row["audio"], row["sample_rate"] = self._samples(file)  # type: ignore[assignment]
        yield pa.table([pa.array([row[field.name]], field.type) for field in schema], schema=schema)

    def _samples(self, file: SourceFile) -> tuple[np.ndarray, int]:
        soundfile = library("soundfile", "audio", "audio")
        content = read_bytes(file.uri)
        with reading(file, "sound"), soundfile.SoundFile(io.BytesIO(content)) as sound:
            frames = sound.read(dtype="float32", always_2d=True)
            rate, missing = int(sound.samplerate), sound.frames - len(frames)
        if missing or not len(frames) or (lacking := _bytes_missing(content)):
            lack = f"{lacking} bytes" if not missing and len(frames) else f"{missing} of its samples"
            raise DataError(f"{file.uri}: cut off, or empty: {lack} are missing", next_step="fetch it again")
        if self._options.sample_rate not in (None, rate):
            raise DataError(
                f"{file.uri}: has {rate} samples a second, and data.audio.sample_rate is {self._options.sample_rate}",
                next_step=f"convert it, as in: sox {file.name} -r {self._options.sample_rate} OUT",
            )
        mixed = frames.mean(axis=1, dtype=np.float64).astype(np.float32) if self._options.channels == "mean" else frames[:, 0]
        return mixed, rate


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
