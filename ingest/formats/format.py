"""What is a file format: how its files are named, which options it has, what its columns mean, and what reads it?

A class in a package of your own becomes `data.format: NAME` by an entry point of the group `penstock.formats`;
docs/extend/format.md has a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import pyarrow as pa

from penstock.config import Section
from penstock.ingest.files.listing import TableFiles
from penstock.ingest.formats.reader import Reader
from penstock.ingest.spec import DataSpec

__all__ = ["Format", "Origin"]


class Origin(NamedTuple):
    """Rows from elsewhere than files, before they are read."""

    identity: Any
    """JSON that is the same as long as the rows are: they are read again when it changes."""
    rows: Callable[[], Any]
    """Read them: a table, or an iterable of Arrow tables or record batches, pandas DataFrames, or dicts of arrays."""
    version: str = ""
    """Part of the files' names, so that it is in the key and in what is shown: `version-12`."""
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context around `rows` and the iteration: turns failures into penstock's errors."""
    files: Callable[[], TableFiles | None] | None = None
    """Find the files that hold the same rows and nothing else, which are read as they are; None where there are none."""


class Format(Protocol):
    """One file format. Derive from it, so that what you leave out has its default.

    The docstring describes the files, in a line; it becomes part of the reference of `data.format`. An object is made
    without arguments, in the driver and in every Ray worker that reads or prepares rows.
    """

    extensions: ClassVar[tuple[str, ...]]
    """Endings of file names in lower case, with the dot: which files of a directory are read. `.gz`, `.bz2`, `.zst` and
    `.lz4` may follow them; `open_stream` (penstock.ingest.files.opening) unpacks these."""
    Options: ClassVar[type[Section] | None] = None
    """The options of `data.NAME` in the pipeline file, or None. Its docstring and those of its fields become the reference."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """Distributions that decide how its files are read, besides pyarrow: their versions are part of the keys, and each node of
    a cluster is asked for the same ones."""
    is_kept: ClassVar[bool] = False
    """Whether `data.train` names no files, but rows that are written to the storage first: then `origin` is asked for them."""
    pins: ClassVar[tuple[str, ...]] = ()
    """Options that name the state of the source that is read, where `is_kept`: predictions read the newest, whatever a
    model was trained on."""
    folder_columns: ClassVar[bool] = True
    """Whether a folder named `month=2011-01` gives its files a column `month`."""
    identity: ClassVar[tuple[str, ...]] = ()
    """The columns whose content decides which split a row belongs to; all columns where it is empty."""
    null_words: ClassVar[pa.Array | None] = None
    """Texts that are null in a column of another type than text. A column that holds nothing else may become text when a file
    is added, so a row's split takes them for null in both."""
    encoded_images: ClassVar[tuple[str, ...]] = ()
    """Columns of bytes that become pixels (`data.images`) after the transforms, unless a transform has made something else of
    them."""
    not_features: ClassVar[tuple[str, ...]] = ()
    """Columns of text, such as the file's name, that transforms may use and training does not see."""

    def origin(self, data: DataSpec, target: str, base_dir: Path) -> Origin:
        """Find rows from elsewhere than files, where `is_kept`. Runs in the driver whenever the sources are listed.

        Args:
            target: the value of `data.train`, or another split.
            base_dir: the folder of the pipeline file.

        Raises:
            SpecError, DataError, ServiceError: there is nothing there, or it does not answer.
        """
        raise NotImplementedError(f"{type(self).__name__} reads files")

    def with_code_files(self, code_files: Sequence[str]) -> Format:
        """Return the format for sources that depend on these files, too, where they are user code (`code.files`)."""
        return self

    def reader(self, data: DataSpec, options: Any) -> Reader:
        """Make the reader of a pipeline's files.

        Args:
            data: `columns`, `types` and `label` are what a reader may need.
            options: an instance of `Options`; None where the format has none.
        """
