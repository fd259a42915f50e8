"""Do the columns exist that a pipeline file names? Checked by the source's names and types, before a row is read.

All wrong names are found together, those of `data` and those of every transform. Columns after a transform that may make
any name are not known, so they are not checked; nor are those of transforms of other packages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from penstock.ingest.columns.fixed_shape import is_text
from penstock.ingest.preprocess.transform_spec import TransformSpec
from penstock.ingest.read.unify import misnamed, refuse_names
from penstock.ingest.spec import DataSpec
from penstock.messages import did_you_mean

__all__ = ["check_named_columns"]


def check_named_columns(
    source: DataSpec,
    transforms: Sequence[TransformSpec],
    columns: Mapping[str, pa.DataType],
    label: str | None,
    slices: Sequence[str] = (),
) -> None:
    """Compare the columns that the pipeline file names with those of the source.

    Args:
        source: the section `data` for reading, whose label is None if a transform may make that column.
        label: as it is after the transforms.
        slices: columns of the source that `evaluate.slices` names.

    Raises:
        SpecError: listing every column that does not exist, or holds text for a transform of numbers.
    """
    present = list(columns)
    read = source.read_columns
    wrong = [
        f"evaluate.slices: there is no column {name!r}{did_you_mean(name, present)}" for name in slices if name not in columns
    ]
    unread = [name for name in slices if name in columns and read is not None and name not in read]
    wrong += [f"evaluate.slices: column {name!r} is not among data.columns" for name in unread]
    refuse_names([*misnamed(source, present), *_misnamed_in_transforms(source, transforms, columns, label), *wrong], present)


def _misnamed_in_transforms(
    source: DataSpec, transforms: Sequence[TransformSpec], columns: Mapping[str, pa.DataType], label: str | None
) -> list[str]:
    problems: list[str] = []
    names = [name for name in columns if source.columns is None or name in source.columns]
    # Some files are known: a column of text there is text, but numbers may be text in other files.
    text = {name for name in names if is_text(columns[name])}
    for number, entry in enumerate(transforms):
        if entry.origin is not None:
            return problems
        transform, where = entry.transform, f"preprocess[{number}].{entry.kind}"
        for name in transform.named(label):
            if name in columns and source.columns is not None and name not in {*source.columns, *names}:
                problems.append(f"{where}: column {name!r} is not among data.columns")
            elif name not in names:
                problems.append(f"{where}: there is no column {name!r} at this point{did_you_mean(name, names)}")
            elif name in text and hasattr(transform.options, "columns") and (advice := transform.refusal(name, pa.string())):
                problems.append(f"{where}: it cannot take column {name!r} of text: {advice}")
        after = transform.names_after(names)
        if after is None:
            return problems
        taken = {*transform.named(label), *(text if transform.takes_all else ())}
        names, text = after, text.intersection(after) - taken
    if label is not None and label not in names and (label in columns or source.label is None):
        problems.append(f"data.label: there is no column {label!r} after the transforms")
    return problems
