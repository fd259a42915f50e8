"""How are raw rows prepared for a model? By the code that prepared the train split.

The label of a raw row is unknown: while the transforms run, its column holds a value of the train split, so that transforms
that expect a label work. A row that cannot be used is reported; the others are prepared.
"""

from __future__ import annotations

import base64
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.arrays import columns_of
from penstock.ingest.columns.casts import cast_array
from penstock.ingest.columns.images import holds_images
from penstock.ingest.columns.type_text import parse_type, type_text
from penstock.ingest.formats.registry import format_of, format_origin
from penstock.ingest.formats.section import DataSection
from penstock.ingest.preprocess.chain import Chain, rows_at_once
from penstock.ingest.preprocess.problems import Origin, Reason, SetAside
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transform_spec import FittedPreprocess
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.ingest.spec import DataSpec
from penstock.messages import shorten
from penstock.training.registry.given_rows import given_rows, raw_table
from penstock.usercode.capture import UserCode

__all__ = ["PreparedRows", "RawForm", "RawRows", "raw_form"]


class RawForm(Section):
    """The description of the preparation that a registered model keeps."""

    version: Literal[1] = 1
    data: DataSection
    """Format, label and images, without files."""
    columns: dict[str, str]
    """The source's columns in their order, with their Arrow types as text."""
    unneeded: tuple[str, ...] = ()
    """Columns that need not be given: the label, and those that the transforms drop without reading."""
    label: str | None = None
    """The column of the source that becomes the label."""
    label_value: Any = None
    """A value of it in the train split; bytes and pictures in Base64."""
    fitted: FittedPreprocess
    code: dict[str, UserCode] = Field(default_factory=dict)
    """`map_batches` target to the user's code."""

    @property
    def requires(self) -> dict[str, str]:
        """Distribution -> version, of what user code imports, and of packages with a format or transform."""
        origins = [format_origin(self.data), *(fitted.step.origin for fitted in self.fitted.steps)]
        added = dict(origin.split("==", 1) for origin in origins if origin is not None and "==" in origin)
        return {name: number for user in self.code.values() for name, number in user.versions.items()} | added

    @property
    def arrow_schema(self) -> pa.Schema:
        """Of the rows that are given."""
        return pa.schema([pa.field(name, parse_type(text)) for name, text in self.columns.items()])


def raw_form(data: DataSpec, fitted: FittedPreprocess, code: Mapping[str, UserCode], example: pa.Table) -> RawForm:
    """Describe how raw rows are prepared.

    Args:
        example: some rows of the train split that can be used: the columns that the transforms begin with.
    """
    source = example.schema
    known = _SourceColumns(data, source, fitted)
    label_value = None if known.label is None or not example.num_rows else example.column(known.label)[0].as_py()
    return RawForm(
        data=data.model_copy(update={"train": "the rows given", "validation": None, "test": None}),
        columns={field.name: type_text(field.type) for field in source},
        unneeded=tuple(sorted(known.unneeded)),
        label=known.label,
        label_value=_as_json(label_value),
        fitted=fitted,
        code={target: user.model_copy(update={"origin": ""}) for target, user in code.items()},
    )


def _as_json(label: Any) -> Any:
    """Write a label as JSON: bytes and pictures in Base64."""
    content = label.get("bytes") if isinstance(label, dict) else label
    return base64.b64encode(content).decode() if isinstance(content, bytes) else label


def _label_of(value: Any, kind: pa.DataType) -> pa.Scalar:
    """Read a label that `_as_json` has written."""
    if holds_images(kind):
        return pa.array([{"bytes": base64.b64decode(value)}], kind)[0]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.scalar(base64.b64decode(value), kind)
    return cast_array(pa.array([value]), kind)[0]


class _SourceColumns:
    """Follows each column of the source through the transforms: which are needed, and which is the label."""

    def __init__(self, data: DataSpec, source: pa.Schema, fitted: FittedPreprocess) -> None:
        called = {name: name for name in source.names}
        """Name at this point -> name in the source."""
        seen: set[str] = set()
        sees_all = False
        self.unneeded: set[str] = set()
        for entry in fitted.steps:
            transform = entry.step.transform
            options = transform.options
            named: Any = [*options] if isinstance(options, dict) else getattr(options, "columns", None)  # a dict: of cast
            is_named = entry.step.origin is None and isinstance(named, list)
            asked = {*named} if is_named else {state.column for state in entry.columns}
            if transform.renames:
                called = {transform.renames.get(name, name): raw for name, raw in called.items()}
            elif transform.drops:
                dropped = {raw for name, raw in called.items() if name in transform.drops}
                self.unneeded |= set() if sees_all else dropped - seen
                called = {name: raw for name, raw in called.items() if raw not in dropped}
            elif is_named or asked:
                seen |= {raw for name, raw in called.items() if name in asked}
            else:
                sees_all = True
        self.label = called.get(str(data.label))
        if not sees_all:
            self.unneeded |= {called[name] for name in format_of(data).not_features if name in called} - seen
        if self.label is not None:
            self.unneeded.add(self.label)


class PreparedRows(NamedTuple):
    """Rows that a model can take, and the problems of the others."""

    table: pa.Table
    """The features, as a shard holds them."""
    rows: np.ndarray
    """int64: which of the given rows they are, ascending."""
    problems: dict[int, str]
    """By given row, of all others."""
    unseen: Mapping[str, int]
    """Column -> number of values that a transform took although the train split lacks the category."""


class RawRows:
    """Prepares rows of a source's columns for a model.

    Args:
        schema: what the model takes.

    Attributes:
        schema: of the rows that are given.
        rows_at_once: how many of them are prepared together.

    Raises:
        UserCodeError: a function of the user's cannot be loaded.
        SpecError, PreflightError: a format or a transform is of a package that is not installed.
    """

    def __init__(self, form: RawForm, schema: FeedSchema) -> None:
        self.form, self.schema = form, form.arrow_schema
        self._features = schema.features
        transforms = [fitted.step for fitted in form.fitted.steps]
        self._chain = Chain(form.data, transforms, form.fitted, form.code, listing=True)
        self._source_names = _source_names(form)
        self.rows_at_once = rows_at_once(form.data, self.schema, transforms)
        self._label = None
        if form.label is not None:
            self._label = _label_of(form.label_value, self.schema.field(form.label).type)

    def prepare(self, table: pa.Table) -> PreparedRows:
        """Prepare rows. A row that cannot be used does not change the others.

        Args:
            table: in the columns and types of `schema`; the label's column may hold anything.

        Raises:
            PenstockError: but no DataError: a package or code cannot be used at all.
        """
        if self._label is not None:
            index = self.schema.get_field_index(str(self.form.label))
            table = table.set_column(index, self.schema.field(index), pa.repeat(self._label, table.num_rows))
        tables: list[pa.Table] = []
        kept: list[np.ndarray] = []
        problems: dict[int, str] = {}
        unseen = Counter[str]()
        for first in range(0, table.num_rows, self.rows_at_once):
            some = table.slice(first, self.rows_at_once).combine_chunks()
            for features, rows in self._usable(some, first, problems):
                tables.append(features)
                kept.append(rows.origin.rows)
                unseen.update({self._source_names.get(name, name): number for name, number in rows.unseen.items()})
        if not tables:
            return PreparedRows(pa.table({}), np.empty(0, np.int64), problems, {})
        return PreparedRows(pa.concat_tables(tables), np.concatenate(kept), problems, dict(unseen))

    def labels(self, table: pa.Table) -> np.ndarray:
        """Return the prepared label of each row: float64 [rows], NaN for a row that cannot be used.

        Args:
            table: raw rows, the label's column among them; columns that the transforms leave out unseen may be missing.

        Raises:
            DataError: a column is missing or has a value of another type, or a transform cannot be applied.
        """
        found = np.full(table.num_rows, np.nan)
        given, problems = raw_table(given_rows(table), self.schema, {*self.form.unneeded} - {self.form.label})
        if problems:
            raise DataError(next(iter(problems.values())))
        for first in range(0, table.num_rows, self.rows_at_once):
            some = given.slice(first, self.rows_at_once).combine_chunks()
            rows = self._chain.prepare(some, Origin.of_file("the held-out rows", first, some.num_rows))
            if rows.table.num_rows:
                found[rows.origin.rows] = rows.table.column(str(self.form.data.label)).to_numpy()
                found[np.flatnonzero(np.bincount(rows.origin.rows) > 1)] = np.nan  # of several rows
        return found

    def _usable(self, table: pa.Table, first: int, problems: dict[int, str]) -> Iterator[tuple[pa.Table, Rows]]:
        """Prepare the rows together; if a transform fails on them, prepare each half."""
        count = table.num_rows
        try:
            rows = self._chain.prepare(table, Origin.of_file("the rows given", first, count))
            features = self._features_of(rows.table) if rows.table.num_rows else None
        except DataError as error:
            if count == 1:
                problems[first] = f"row {first}: {error.message}"
                return
            half = count // 2
            yield from self._usable(table.slice(0, half), first, problems)
            yield from self._usable(table.slice(half), first + half, problems)
            return
        found = {
            row: self._problem(table.slice(row - first, 1), aside, example)
            for aside in rows.set_aside
            for row, example in zip(aside.origin.rows.tolist(), aside.examples, strict=True)
        }
        made = np.bincount(rows.origin.rows - first, minlength=count)
        for row in np.flatnonzero(made == 0).tolist():
            problems[first + row] = f"row {first + row}: {found.get(first + row, _LEFT_OUT)}"
        for aside in rows.set_aside:
            np.add.at(made, aside.origin.rows - first, 1)
        if (several := made > 1).any():
            for row in np.flatnonzero(several).tolist():
                of = f"{made[row]} rows of it, and the model answers one"
                problems[first + row] = f"row {first + row}: the preprocessing makes {of}"
            once = ~several[rows.origin.rows - first]
            features = features.filter(pa.array(once)) if features is not None and once.any() else None
            rows.origin = rows.origin.take(once)
        if features is not None:
            yield features, rows

    def _problem(self, row: pa.Table, aside: SetAside, value: str) -> str:
        """Describe column, value and rule; if the transforms do not give the value, take the one of the row."""
        column = self._source_names.get(aside.column, aside.column)
        if not value:
            held = row.column(column)[0].as_py() if column in row.column_names else None
            value = shorten(held) if held is not None else "NaN or an infinity" if aside.reason == "not finite" else "null"
        return f"column {column!r} holds {value}; {_RULES[aside.reason]}"

    def _features_of(self, table: pa.Table) -> pa.Table:
        """Select the features, in the model's order. Raises DataError if one is not as the model takes it."""
        made = {info.name: info for info in columns_of(table.schema)}
        columns = {}
        for wanted in self._features:
            column, info = table.column(wanted.name) if wanted.name in made else None, made.get(wanted.name)
            if column is not None and info is not None and info.dtype != wanted.dtype and _plain(info) and _plain(wanted):
                kind = pa.from_numpy_dtype(np.dtype(wanted.dtype))
                with contextlib.suppress(pa.ArrowException):  # user code may return integers or floats
                    column, info = cast_array(column, kind), wanted
            if column is None or info != wanted:
                raise DataError(f"its column {wanted.name!r} comes out as {info or 'nothing'}; the model takes {wanted}")
            columns[wanted.name] = column
        return pa.table(columns)


def _plain(info: ColumnInfo) -> bool:
    return not info.shape and info.ragged is None and not info.encoded


_LEFT_OUT = "the preprocessing leaves it out (filter, flat_map, or `_keep` of map_batches)"

_RULES: dict[Reason, str] = {
    "null": "the model needs a value there",
    "empty": "the model needs a value there",
    "not finite": "the model needs a finite number there",
    "unknown category": "which is none of the categories of the train split",
    "label out of range": "which is not a class of the train split",
    "broken image": "which is not an image that can be decoded",
}


def _source_names(form: RawForm) -> dict[str, str]:
    """Map names between the transforms to names in the source, if a name means one column throughout."""
    called = {name: name for name in form.columns}
    meant = {name: {name} for name in called}
    for entry in form.fitted.steps:
        renames = entry.step.transform.renames
        called = {renames.get(name, name): raw for name, raw in called.items()} if renames else called
        for name, raw in called.items():
            meant.setdefault(name, set()).add(raw)
    return {name: next(iter(raws)) for name, raws in meant.items() if len(raws) == 1}
