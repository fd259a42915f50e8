"""What is a file format: how its files are named, which options it has, what its columns mean, and what reads it?

A class in a package of your own becomes `data.format: NAME` by an entry point of the group `penstock.formats`;
docs/extend/format.md has a whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from penstock.config import Section
from penstock.ingest.files.listing import Listing, SourceFile, list_source
from penstock.ingest.formats.reader import Reader
from penstock.ingest.spec import DataSpec
from penstock.storage import Storage

__all__ = ["Format"]


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
    """Whether `data.train` names no files, but rows that are written to the storage first, as `KeptFormat` of
    penstock.ingest.formats.sources.kept does it."""
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

    def listing(self, data: DataSpec, base_dir: Path, storage: Storage, code_files: Sequence[str] = ()) -> Listing:
        """List the files that hold the rows. Runs in the driver.

        Args:
            base_dir: the folder of the pipeline file.
            storage: gets the rows where `is_kept`.
            code_files: files on which a source that is user code depends, besides those that it names (`code.files`).

        Raises:
            SpecError, PreflightError, DataError, ServiceError: there is nothing there, or it does not answer.
        """
        return list_source(data, base_dir, self.extensions)

    def forget_others(self, files: Sequence[SourceFile], storage: Storage) -> None:
        """Delete rows in the storage that are of other sources than `files`, which `listing` gave, where `is_kept`."""

    def reader(self, data: DataSpec, options: Any) -> Reader:
        """Make the reader of a pipeline's files.

        Args:
            data: `columns`, `types` and `label` are what a reader may need.
            options: an instance of `Options`; None where the format has none.
        """
