"""Which rows of the source are held out, and which belong to which slice? By the source's values, before `preprocess`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import SpecError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.provenance import Sources, sources_of
from penstock.ingest.preprocess.chain import rows_at_once, split_rows
from penstock.ingest.preprocess.problems import Origin
from penstock.ingest.preprocess.transform_spec import TransformSpec
from penstock.ingest.read.snapshot import SourceSnapshot
from penstock.ingest.schema import Split
from penstock.ingest.spec import DataSpec
from penstock.messages import did_you_mean
from penstock.storage import Storage
from penstock.tasks.context import RunContext
from penstock.training.evaluation.evaluate import Slice

__all__ = ["MAX_VALUES", "HeldOut", "held_out_of", "slices_of"]

MAX_VALUES = 50
"""Slices of a column without edges: those of most rows. A column of ids would make one of every row."""

_ROWS_OF_A_FILE = 1 << 40
"""More than any file has: file and row become one number to look up by."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out rows of a run, in the source and prepared. Picklable: they are read where the model is measured.

    Attributes:
        manifest: of the prepared rows.
        storage: that holds them.
    """

    data: DataSpec
    snapshot: SourceSnapshot
    transforms: Sequence[TransformSpec]
    manifest: DatasetManifest
    storage: Storage

    def location(self, split: Split) -> str:
        """Return the location of a split's files: its own, or that of train."""
        return split if isinstance(getattr(self.data, split), str) else "train"

    def raw(self, split: Split) -> Iterator[tuple[pa.Table, Origin]]:
        """Yield the rows of a split and their places, with the label and the columns for the first transform."""
        files = [file for file in self.snapshot.files if file.location == self.location(split)]
        at_once = rows_at_once(self.data, self.snapshot.arrow_schema(), self.transforms)
        rows = split_rows(self.data, self.snapshot, files, at_once)
        return ((table, origin) for of, table, origin in rows if of == split)


def held_out_of(ctx: RunContext) -> HeldOut:
    """Collect what is needed to read the held-out rows of this run."""
    spec = ctx.project.spec
    return HeldOut(spec.data, ctx.snapshot, spec.preprocess, ctx.manifest, ctx.storage)


def slices_of(
    held_out: HeldOut, split: Split, wanted: Sequence[str | Mapping[str, Sequence[float]]], warn: Callable[[str], None]
) -> list[Slice]:
    """List the slices that have rows of the split.

    Args:
        wanted: entries of `evaluate.slices`.
        warn: called for a column with too many values.

    Raises:
        SpecError: the source has no such column, or one with edges holds no numbers.
    """
    edges: dict[str, Sequence[float] | None] = {}
    for each in wanted:
        edges |= {each: None} if isinstance(each, str) else each
    ids = np.arange(held_out.manifest.rows[split])
    table = _values(held_out, split, list(edges), sources_of(held_out.storage, held_out.manifest, split, ids))
    found = []
    for name, cuts in edges.items():
        found += _by_value(warn, name, table.column(name)) if cuts is None else _by_edges(name, table.column(name), cuts)
    return found


def _values(held_out: HeldOut, split: Split, names: list[str], sources: Sources) -> pa.Table:
    """Read columns of the source in the order of the prepared rows."""
    number = {name: index for index, name in enumerate(sources.names)}
    number = {file.uri: number.get(file.name, len(number)) for file in held_out.snapshot.files}
    tables, places = [], []
    for table, origin in held_out.raw(split):
        for name in names:
            if name not in table.column_names:
                raise SpecError(
                    f"evaluate.slices: the source has no column {name!r}{did_you_mean(name, table.column_names)}",
                    problems=[f"it has {', '.join(table.column_names[:40])}"],
                    next_step="correct evaluate.slices, and run the same command again: training is done",
                )
        files = np.array([number[uri] for uri in origin.names], np.int64)[origin.files]
        tables.append(table.select(names))
        places.append(files * _ROWS_OF_A_FILE + origin.rows)
    placed = np.concatenate(places)
    order = np.argsort(placed, kind="stable")
    at = np.searchsorted(placed[order], sources.files.astype(np.int64) * _ROWS_OF_A_FILE + sources.rows)
    return pa.concat_tables(tables).take(pa.array(order[at]))


def _by_value(warn: Callable[[str], None], name: str, values: pa.ChunkedArray) -> list[Slice]:
    if pa.types.is_nested(values.type):
        raise SpecError(
            f"evaluate.slices: column {name!r} is {values.type}, and slices are of single values",
            next_step="correct evaluate.slices, and run the same command again: training is done",
        )
    counted = pc.value_counts(values.combine_chunks()).to_pylist()
    counted.sort(key=lambda each: (-each["counts"], str(each["values"])))
    if len(counted) > MAX_VALUES:
        warn(f"evaluate.slices: {name!r} has {len(counted):,} values; the {MAX_VALUES} of most rows are measured")
    found = []
    for each in counted[:MAX_VALUES]:
        value = each["values"]
        rows = pc.is_null(values) if value is None else pc.equal(values, pa.scalar(value, values.type))
        rows = pc.is_nan(values) if value != value else rows  # which does not equal itself
        shown = "null" if value is None else repr(value) if value == "null" else value
        found.append(Slice(name, f"{name}={shown}", rows.fill_null(False).to_numpy(zero_copy_only=False).astype(np.bool_)))
    return found


def _by_edges(name: str, values: pa.ChunkedArray, edges: Sequence[float]) -> list[Slice]:
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type) or pa.types.is_decimal(values.type)):
        raise SpecError(
            f"evaluate.slices: column {name!r} is {values.type}, and edges are for numbers", next_step=f"write {name}"
        )
    numbers = values.cast(pa.float64(), safe=False)
    texts = [f"{edge:g}" if float(f"{edge:g}") == edge else repr(edge) for edge in edges]
    labels = [f"{name}<{texts[0]}", *(f"{low}<={name}<{high}" for low, high in pairwise(texts)), f"{name}>={texts[-1]}"]
    between = np.digitize(numbers.to_numpy(zero_copy_only=False), edges)
    known = ~np.isnan(numbers.to_numpy(zero_copy_only=False))
    found = [Slice(name, label, (between == index) & known) for index, label in enumerate(labels)]
    found.append(Slice(name, f"{name}=null", ~known))
    return [each for each in found if each.rows.any()]
