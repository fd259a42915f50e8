"""How do source rows become rows to train on? All transforms in order, then every column checked to be numbers of one shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError, SpecError
from penstock.ingest.columns.arrays import PROVENANCE_COLUMNS
from penstock.ingest.columns.extension_types import ImageType, RaggedType
from penstock.ingest.columns.fixed_shape import is_number, is_tensor, is_text
from penstock.ingest.columns.images import holds_images, pixel_bytes
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import format_of
from penstock.ingest.phases import phase
from penstock.ingest.preprocess.problems import NEVER_DROPPED, Origin, raise_for
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transform_spec import FittedPreprocess, FittedTransform, TransformSpec
from penstock.ingest.preprocess.transforms.decode_image import decode_images
from penstock.ingest.read.inspection import Piece, pieces_of
from penstock.ingest.read.snapshot import BATCH_BYTES, SourceSnapshot, iterate_rows
from penstock.ingest.read.splits import row_hashes, split_codes
from penstock.ingest.schema import Split
from penstock.ingest.spec import DataSpec
from penstock.messages import did_you_mean
from penstock.usercode.capture import UserCode

__all__ = [
    "BATCH_ROWS",
    "MAX_CLASSES",
    "NUMBERS_BATCH_ROWS",
    "Chain",
    "Preparation",
    "apply_transforms",
    "cut_by_pixels",
    "decodes_images",
    "rows_at_once",
    "split_rows",
]

BATCH_ROWS = 4096
"""Most rows that a map_batches function is given."""

IMAGE_BATCH_ROWS = 256
"""Rows prepared together if they hold images: decoded ones are a hundred times larger than rows of a table."""

NUMBERS_BATCH_ROWS = 65536

NUMBERS_BATCH_BYTES = 16 << 20
"""Rows of numbers alone are read in larger batches: the fixed cost of a batch equals that of thousands of rows."""

MAX_CLASSES = 100_000
"""An integer label must be below this; a larger one is refused (for regression, cast the label to a float)."""


class Chain:
    """All transforms of a pipeline, ready to be applied in this process.

    Args:
        transforms: those of the pipeline file; `fitted` must have been made from them.
        code: `map_batches` target to the user's code, which is loaded here.
        listing: whether each row that is left out is listed with its reason (`Rows.set_aside`), and none is an error.

    Raises:
        ValueError: `fitted` belongs to other transforms.
        UserCodeError: user code cannot be imported.
    """

    def __init__(
        self,
        data: DataSpec,
        transforms: Sequence[TransformSpec],
        fitted: FittedPreprocess,
        code: Mapping[str, UserCode],
        *,
        listing: bool = False,
    ) -> None:
        # Compared as JSON, in which the fitted state was kept: it turns a date in an option into text.
        if [each.step.model_dump(mode="json") for each in fitted.steps] != [it.model_dump(mode="json") for it in transforms]:
            raise ValueError("the fitted state was made from other transforms than those given")
        self._data, self._fitted, self._listing = data, fitted.steps, listing
        self._functions = {target: user.function() for target, user in code.items()}

    def prepare(self, table: pa.Table, origin: Origin) -> Rows:
        """Prepare rows; unusable ones are left out and listed in the result's `problems`.

        Columns of the result are as a shard holds them. Its table may be empty, and then has no meaningful schema.

        Raises:
            DataError: a transform or a column's type is wrong for any rows; under `invalid: drop` also a label that is not a
                class index. Else the caller raises for `problems`.
        """
        rows = Rows(table, origin, listing=self._listing)
        apply_transforms(rows, self._fitted, self._data, self._functions)
        if rows.num_rows:
            self._finish(rows)
        if self._data.invalid == "drop" and not self._listing:
            raise_for([problem for problem in rows.problems if problem.reason in NEVER_DROPPED], label=self._data.label)
        return rows

    def _finish(self, rows: Rows) -> None:
        _finish_format(rows, self._data)
        label = self._data.label
        names = dict.fromkeys(rows.table.column_names)
        if label is not None and label not in names:
            raise SpecError(
                f"data.label: there is no column {label!r} after the transforms; the rows have {', '.join(names)}"
                + did_you_mean(label, list(names)),
                next_step="correct data.label, or keep that column in the transforms",
            )
        if "" in names:
            raise DataError(
                "a column has no name, which a model's inputs need; pandas writes the numbers of the rows so",
                next_step='leave it out (preprocess: - drop: [""]), or give it a name in the source',
            )
        for name in PROVENANCE_COLUMNS:
            if name in names:
                raise DataError(f"the column name {name!r} is taken by penstock", next_step="rename it")
        for name in names:
            kind = rows.column(name).type
            companion = f"{name}_{'length' if kind.batch == 'padded' else 'offsets'}" if isinstance(kind, RaggedType) else None
            if companion in names:
                raise DataError(
                    f"the column name {companion!r} is taken: batches hold the lengths of the lists of {name!r} under it",
                    next_step="rename or drop that column",
                )
            _finish_column(rows, name, self._data, is_label=name == label)
            if not rows.num_rows:
                return
        if label is not None:
            _check_label(rows, label)


def apply_transforms(
    rows: Rows, transforms: Sequence[FittedTransform], data: DataSpec, functions: Mapping[str, object]
) -> None:
    """Apply `transforms` to `rows` in place, and stop early if no row is left."""
    for number, entry in enumerate(transforms):
        if not rows.num_rows:
            return
        with entry.step.naming_it(number, rows.where):
            entry.step.transform.apply(rows, entry.columns, data, functions)


def _finish_format(rows: Rows, data: DataSpec) -> None:
    """Apply the meaning of the format's columns without a transform: decode images, and drop file names."""
    meaning = format_of(data)
    for name in meaning.not_features:
        if name in rows.table.column_names and is_text(rows.table.schema.field(name).type):
            rows.table = rows.table.drop_columns([name])
    for name in meaning.encoded_images:
        if name in rows.table.column_names and pa.types.is_binary(rows.table.schema.field(name).type):
            decode_images(rows, name, data.images)


def _finish_column(rows: Rows, name: str, data: DataSpec, *, is_label: bool) -> None:
    kind = rows.column(name).type
    if holds_images(kind):
        decode_images(rows, name, data.images, is_mask=is_label)
        return
    if is_label and (isinstance(kind, ImageType) or (isinstance(kind, RaggedType) and kind.batch == "packed")):
        raise DataError(
            f"the label {name!r} holds images, or lists that a batch joins; lists as a label are padded",
            next_step="leave data.label out, and let the recipe's loss read the column",
        )
    if data.any_type and not is_label and not is_tensor(kind):
        return
    rows.fix_shape(name, is_label=is_label)
    kind = rows.column(name).type
    if is_label and isinstance(kind, pa.FixedShapeTensorType) and kind.shape == [1] and pa.types.is_integer(kind.value_type):
        rows.put(name, rows.column(name).storage.flatten())  # classes of shape (rows, 1), as Keras' data sets have them


def _check_label(rows: Rows, label: str) -> None:
    """Cast integer labels to int64 and reject those that are not class indices (0 to `MAX_CLASSES` - 1)."""
    kind = rows.column(label).type
    if not pa.types.is_integer(kind):
        return
    values = rows.column(label).to_numpy()  # some of uint64 do not fit into int64
    rows.reject((values < 0) | (values >= MAX_CLASSES), "label out of range", label, lambda row: str(values[row]))
    rows.put(label, pc.cast(rows.column(label), pa.int64()))


def split_rows(
    data: DataSpec, snapshot: SourceSnapshot, files: Sequence[SourceFile], batch_rows: int, piece: Piece | None = None
) -> Iterator[tuple[Split, pa.Table, Origin]]:
    """Read `files` and yield the rows of each split apart, in batches that depend on the file only."""
    # Columns that only the rules of splits use are dropped here. A pass that fits transforms may read fewer than the others.
    read = {column.name for column in snapshot.columns}
    kept = None if data.columns is None else [name for name in data.columns if name in read]
    for batch in iterate_rows(data, snapshot, files, batch_rows, piece):
        origin = Origin.of_batch(batch.files, batch.first_row, batch.table.num_rows)
        with phase("transform"):
            codes = split_codes(data, batch.table, batch.files)
        rows = batch.table if kept is None else batch.table.select(kept)
        for number, split in enumerate(data.locations):
            mask = codes == number
            if not mask.any():
                continue
            if mask.all():
                yield split, rows, origin
            else:
                yield split, rows.filter(pa.array(mask)).combine_chunks(), origin.take(mask)


def decodes_images(data: DataSpec, source: pa.Schema, transforms: Sequence[TransformSpec]) -> bool:
    """Return whether rows hold images that the transforms decode."""
    images = any(holds_images(field.type) for field in source)
    formats = bool(format_of(data).encoded_images)
    return images or formats or any(entry.transform.decodes_images for entry in transforms)


def cut_by_pixels(table: pa.Table, origin: Origin) -> Iterator[tuple[pa.Table, Origin]]:
    """Cut a table into parts of about `BATCH_BYTES` of decoded pixels: a decoded photo takes a hundred times its file.

    A part has at least one row; the cuts depend on the rows only.
    """
    sizes = np.zeros(table.num_rows, np.int64)
    for field, column in zip(table.schema, table.columns, strict=True):
        contents = pc.struct_field(column, "bytes") if holds_images(field.type) else column
        if pa.types.is_binary(contents.type) or pa.types.is_large_binary(contents.type):
            sizes += [pixel_bytes(content.as_buffer()) if content.is_valid else 0 for content in contents]
    ends, begin = np.cumsum(sizes), 0
    while begin < table.num_rows:
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
        mask = np.zeros(table.num_rows, np.bool_)
        mask[begin:end] = True
        yield (table, origin) if mask.all() else (table.slice(begin, end - begin), origin.take(mask))
        begin = end


def rows_at_once(data: DataSpec, source: pa.Schema, transforms: Sequence[TransformSpec]) -> int:
    """Return the number of source rows to prepare together. The prepared rows do not depend on it."""
    if decodes_images(data, source, transforms):
        return IMAGE_BATCH_ROWS
    types = [field.type for field in source]
    widens = any(entry.transform.widens_rows for entry in transforms)
    if widens or not all(is_number(kind) for kind in types):
        return BATCH_ROWS
    row_bytes = 8 * max(1, len(types))
    return max(BATCH_ROWS, min(NUMBERS_BATCH_ROWS, NUMBERS_BATCH_BYTES // row_bytes))


@dataclass(frozen=True)
class Preparation:
    """Everything that is needed to prepare the rows of a source. Picklable: it is sent to the workers.

    Attributes:
        transforms: those of the pipeline file; `fitted` was made from them.
        snapshot: the files, and the schema that they agreed on.
        code: `map_batches` target to the user's code.
        piece: the rows of the only file; None for all.
    """

    data: DataSpec
    transforms: Sequence[TransformSpec]
    fitted: FittedPreprocess
    snapshot: SourceSnapshot
    code: Mapping[str, UserCode]
    piece: Piece | None = None

    @property
    def rows_at_once(self) -> int:
        """Rows to read at a time."""
        return rows_at_once(self.data, self.snapshot.arrow_schema(), self.transforms)

    def only(self, files: Sequence[SourceFile]) -> Preparation:
        """Return the preparation of some of the files."""
        return replace(self, snapshot=self.snapshot.model_copy(update={"files": tuple(files)}))

    def cut(self, piece_bytes: int) -> list[Preparation]:
        """Return the preparations of pieces of about `piece_bytes`, in order; self alone if the file cannot be cut.

        Raises:
            DataError, ServiceError: the file cannot be opened.
        """
        files = self.snapshot.files
        cut = pieces_of(self.data, self.snapshot.format, files[0], self.rows_at_once, piece_bytes) if len(files) == 1 else []
        return [replace(self, piece=piece) for piece in cut] or [self]

    def rows(
        self, read: Callable[[Split, pa.Table], None] = lambda _split, _rows: None, *, hashed: bool = False
    ) -> Iterator[tuple[Split, Rows]]:
        """Read and prepare the files batch by batch; bad rows are in each result's `problems`, empty results come too.

        Args:
            read: called with all rows as they were read.
            hashed: whether to add the rows' hashes to each result's `origin`.
        """
        chain = Chain(self.data, self.transforms, self.fitted, self.code)
        files = self.snapshot.files
        decodes = decodes_images(self.data, self.snapshot.arrow_schema(), self.transforms)
        for split, table, origin in split_rows(self.data, self.snapshot, files, self.rows_at_once, self.piece):
            read(split, table)
            if hashed:
                origin.hashes = row_hashes(self.data, table)
            for part, of in cut_by_pixels(table, origin) if decodes else ((table, origin),):
                with phase("transform"):
                    prepared = chain.prepare(part, of)
                yield split, prepared

    def tables(self) -> Iterator[tuple[Split, pa.Table]]:
        """Read and prepare the files: tables of columns as a shard holds them, without provenance, never empty.

        Raises:
            DataError: at the first batch with a row that cannot be used, under `data.invalid: error`.
        """
        for split, rows in self.rows():
            if self.data.invalid == "error":
                raise_for(rows.problems, label=self.data.label)
            if rows.num_rows:
                yield split, rows.table
