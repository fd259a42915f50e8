"""What do the transforms learn from the train split? Each is fitted on rows prepared by those before it.

Transforms that learn about different columns, which none between them changes, learn in one pass over the source. Missing
values are left out of what is learnt; materialize reports them where they matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number, is_text
from penstock.ingest.files.unit_plan import plan_units
from penstock.ingest.formats.registry import format_of
from penstock.ingest.preprocess.chain import (
    BATCH_ROWS,
    NUMBERS_BATCH_ROWS,
    Preparation,
    apply_transforms,
    cut_by_pixels,
    split_rows,
)
from penstock.ingest.preprocess.learnt import ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.tallies import ask
from penstock.ingest.preprocess.transform_spec import FittedPreprocess, FittedTransform, TransformSpec
from penstock.ingest.preprocess.transforms.transform import ALL_COLUMNS
from penstock.ingest.ray_tasks import ParallelMap, local_map, ray_map
from penstock.ingest.read.inspection import PART_BYTES
from penstock.ingest.read.snapshot import SourceSnapshot, opens_files
from penstock.ingest.spec import DataSpec, SplitRule
from penstock.messages import in_yaml
from penstock.progress import Progress
from penstock.usercode.capture import UserCode

__all__ = ["fit_preprocess", "needs_fit"]

FIT_UNIT_BYTES = 16 << 20
"""Source bytes read by one task. Not part of a key, but sums round by it, so it must not depend on the cluster."""

_FEW_IMAGES = 16
"""Images decoded to find the type of the decoded column."""


def needs_fit(transforms: Sequence[TransformSpec]) -> bool:
    """Return whether any transform learns something, so that fitting reads rows."""
    return any(entry.transform.learns for entry in transforms)


def fit_preprocess(
    data: DataSpec,
    transforms: Sequence[TransformSpec],
    snapshot: SourceSnapshot,
    code: Mapping[str, UserCode],
    progress: Progress,
    *,
    parallel: ParallelMap = ray_map,
) -> FittedPreprocess:
    """Fit all transforms on the train split.

    Args:
        code: `map_batches` target to the user's code.
        parallel: where the rows are read; `ray_map` needs Ray to be initialised if `needs_fit(transforms)`.

    Raises:
        DataError: a transform names a column that does not exist or has the wrong type, or a column has no values.
    """
    fitted: list[FittedTransform] = []
    progress(0, len(transforms), "transforms")
    while len(fitted) < len(transforms):
        entry = transforms[len(fitted)]
        if not entry.transform.learns:
            fitted.append(FittedTransform(step=entry))
        else:
            files = tuple(file for file in snapshot.files if file.location == "train")
            train, so_far = snapshot.model_copy(update={"files": files}), FittedPreprocess(steps=tuple(fitted))
            of = Preparation(data, transforms[: len(fitted)], so_far, train, dict(code))
            source = _TrainRows(of, _required(data, transforms, snapshot))
            fitted += _fit_pass(source, transforms[len(fitted) :], parallel)
        progress(len(fitted), len(transforms), "transforms", fitted[-1].step.kind)
    # Other columns may be encoded, too.
    encoders = [entry for entry in fitted if entry.step.transform.names_classes and entry.columns[0].column == data.label]
    classes = tuple(str(value) for value in encoders[0].columns[0].categories or ()) if encoders else None
    return FittedPreprocess(steps=tuple(fitted), classes=classes, num_classes=None if classes is None else len(classes))


def _required(data: DataSpec, transforms: Sequence[TransformSpec], snapshot: SourceSnapshot) -> tuple[str, ...]:
    """Return the columns whose rows without a value will be left out: no transform fills, drops or may change them."""
    if data.invalid == "error" or any(entry.transform.makes_columns or entry.origin is not None for entry in transforms):
        return ()
    kinds = {field.name: field.type for field in snapshot.arrow_schema()}
    names = {name: name for name, kind in kinds.items() if is_number(kind) or is_text(kind)}  # at this point -> in the source
    for hidden in format_of(data).not_features:
        names.pop(hidden, None)
    for entry in transforms:
        transform = entry.transform
        taken = getattr(transform.options, "columns", ())
        if transform.takes_nulls and taken == ALL_COLUMNS:
            names = {}
        for gone in (*transform.drops, *(taken if transform.takes_nulls else ())):
            names.pop(gone, None)
        names = {transform.renames.get(name, name): source for name, source in names.items()}
    return tuple(sorted(names.values()))


@dataclass(frozen=True)
class _TrainRows:
    """The train split, prepared by the transforms fitted so far. Picklable, so that workers can read it."""

    of: Preparation
    """Of the files that hold rows of the train split."""
    required: tuple[str, ...] = ()
    """Columns of the source whose rows without a value will be left out, so that nothing is learnt from them."""

    def tables(self, max_rows: int = NUMBERS_BATCH_ROWS) -> Iterator[pa.Table]:
        """Yield tables of 1 to `max_rows` rows; unusable rows are left out."""
        of, functions = self.of, {target: user.function() for target, user in self.of.code.items()}
        batch_rows = min(of.rows_at_once, max_rows)
        for split, table, origin in split_rows(of.data, of.snapshot, of.snapshot.files, batch_rows, of.piece):
            if split != "train":
                continue
            for part, part_origin in cut_by_pixels(table, origin) if self.decodes else ((table, origin),):
                rows = Rows(part, part_origin)
                for name in self.required:
                    rows.reject_missing(name)
                apply_transforms(rows, of.fitted.steps, of.data, functions)
                if rows.num_rows:
                    yield rows.table

    @property
    def decodes(self) -> bool:
        """Whether a transform decodes images."""
        return any(entry.transform.decodes_images for entry in self.of.transforms)

    def units(self) -> list[list[_TrainRows]]:
        """Return units of some files each, those of a large file in pieces."""
        units = plan_units(self.of.snapshot.files, FIT_UNIT_BYTES)
        return [[replace(self, of=part) for part in self.of.only(files).cut(PART_BYTES)] for files in units]

    def finds_rows(self, entry: TransformSpec) -> bool:
        """Return whether a transform may leave out rows, so that later transforms must not learn from them."""
        return self.of.data.invalid != "error" and not (entry.transform.drops or entry.transform.renames)

    def narrowed(self, columns: set[str]) -> _TrainRows:
        """Read only these columns, if nothing else needs the others."""
        of = self.of
        by_hash = any(isinstance(rule, SplitRule) for rule in (of.data.validation, of.data.test))
        if of.transforms or by_hash:
            return self
        wanted = columns.union(self.required)
        kept = tuple(column for column in of.snapshot.columns if column.name in wanted)
        return replace(self, of=replace(of, snapshot=of.snapshot.model_copy(update={"columns": kept})))

    def schema(self) -> pa.Schema:
        """Return the types of the rows, found from the first ones."""
        first = next(self.tables(_FEW_IMAGES if self.decodes else BATCH_ROWS), None)
        if first is None:
            raise DataError(
                "preprocess: the train split has no usable rows to learn from",
                next_step="check data.train, and the fractions of data.validation and data.test",
            )
        return first.schema


def _touched(fitted: FittedTransform) -> set[str] | None:
    """Return the columns that a transform reads or changes; None if they may be any."""
    transform = fitted.step.transform
    if not transform.learns and fitted.step.origin is not None:
        return None
    names = [column.column for column in fitted.columns] or list(transform.named(None))
    after = transform.names_after(names)
    return {*names, *after} if names and after is not None else None


def _changed(entry: TransformSpec, schema: pa.Schema, label: str | None) -> set[str] | None:
    """Do as `_touched` for a transform that learns nothing; `*` may be every column but the label."""
    transform = entry.transform
    after = transform.names_after(schema.names) if transform.takes_all and entry.origin is None else None
    if after is None:
        return _touched(FittedTransform(step=entry))
    return {name for name in schema.names if name != label}.union(set(after).difference(schema.names))


def _fit_pass(source: _TrainRows, transforms: Sequence[TransformSpec], parallel: ParallelMap) -> list[FittedTransform]:
    """Fit the leading transforms of `transforms` that do not depend on each other: each learns about other columns."""
    schema, first, data = source.schema(), len(source.of.transforms), source.of.data
    group: list[tuple[TransformSpec, list[str]]] = []
    taken: set[str] = set()
    for number, entry in enumerate(transforms, first):
        transform = entry.transform
        if not transform.learns:
            changed = _changed(entry, schema, data.label)
            if changed is None or source.finds_rows(entry):
                break
            taken |= changed
            group.append((entry, []))
            continue
        if taken and (transform.takes_all or taken & set(transform.named(data.label))):
            break
        with entry.naming_it(number, lambda: f"the columns {', '.join(schema.names)}"):
            columns = transform.columns_of(schema, data)
        if taken & set(columns):
            break
        taken |= set(columns)
        group.append((entry, columns))
    wanted = {column for _, columns in group for column in columns}
    source = source.narrowed(wanted)
    asked = [(number, entry, column) for number, (entry, columns) in enumerate(group, first) for column in columns]
    units = source.units()
    where = parallel if opens_files(data, source.of.snapshot) else local_map
    answers = ask([_question(*each) for each in asked], units, where)
    learnt = {each[-1]: _learnt(*each, facts) for each, facts in zip(asked, answers, strict=True)}
    return [FittedTransform(step=entry, columns=tuple(learnt[column] for column in columns)) for entry, columns in group]


def _question(number: int, entry: TransformSpec, column: str) -> Question:
    with entry.naming_it(number, lambda: f"column {column!r}"):
        return entry.transform.question(column)


def _learnt(number: int, entry: TransformSpec, column: str, facts: ColumnFacts | None) -> ColumnState:
    if facts is None:
        raise DataError(
            f"preprocess[{number}].{entry.kind}: column {column!r} has no values in the train split",
            next_step=f"leave the column out (drop: [{in_yaml(column)}]), or check the transforms before",
        )
    with entry.naming_it(number, lambda: f"the facts of column {column!r} of the train split: {facts}"):
        return entry.transform.learn(column, facts)
