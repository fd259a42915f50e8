"""Which columns does a feed have, and which splits are there?"""

from __future__ import annotations

from typing import Literal

from penstock.config import Section

__all__ = ["METRICS_OF", "SPLITS", "ColumnInfo", "FeedSchema"]

Split = str
"""`train`, `validation`, `test`, or a further dataset of `data.datasets`."""

SPLITS: tuple[Split, ...] = ("train", "validation", "test")

METRICS_OF: dict[Split, str] = {"train": "train", "validation": "val", "test": "test"}
"""Prefix of the names of a split's metrics: `val/accuracy`."""


class ColumnInfo(Section):
    """One column."""

    name: str
    dtype: str
    """numpy name: float32, uint8, int64, ... Booleans are stored as uint8."""
    shape: tuple[int, ...] = ()
    """Shape of one row's value; () for a scalar, and for lists of unequal length."""
    ragged: Literal["padded", "packed"] | None = None
    """None: every row has `shape`. Otherwise rows are lists, and a batch of them is two tensors. `padded`: `name` [rows,
    longest] and `name_length`, int64 [rows]; `packed`: `name` [entries of all rows] and `name_offsets`, int64 [rows + 1]."""
    pad_value: float = 0.0
    """Fills a padded batch after a row's entries."""
    encoded: bool = False
    """Whether shards hold image files, which the feed decodes to `shape`."""
    arrow: str | None = None
    """Arrow type of a column that is not numbers (`data.any_type`): its dtype is `object`, batches have it in `Batch.arrow`."""

    def __str__(self) -> str:
        """Format name and type: `image: uint8[28, 28, 1]`, `tokens: int32[*]`."""
        return f"{self.name}: {self.type_text}"

    @property
    def type_text(self) -> str:
        """Dtype and shape of a row's value, for people."""
        if self.arrow is not None:
            return self.arrow
        shape = ["*"] if self.ragged else [str(size) for size in self.shape]
        return self.dtype + (f"[{', '.join(shape)}]" if shape else "")

    @property
    def varies(self) -> bool:
        """Whether rows differ in size."""
        return self.ragged is not None or self.arrow is not None

    @property
    def companion(self) -> str | None:
        """Name of the second tensor of a column of lists: lengths if padded, offsets if packed."""
        return None if self.ragged is None else f"{self.name}_{'length' if self.ragged == 'padded' else 'offsets'}"


class FeedSchema(Section):
    """The argument of a recipe's `build_model(schema)`: the columns of a batch, without the leading row dimension."""

    columns: tuple[ColumnInfo, ...]
    label: str | None = None
    num_classes: int | None = None
    """Number of classes if the label is an integer class index, else None."""
    classes: tuple[str, ...] | None = None
    """Names of the classes in index order, if known."""

    def __getitem__(self, name: str) -> ColumnInfo:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(f"no column {name!r}; the dataset has {[c.name for c in self.columns]}")

    @property
    def packed(self) -> tuple[str, ...]:
        """Names of the columns of packed lists."""
        return tuple(column.name for column in self.columns if column.ragged == "packed")

    @property
    def features(self) -> tuple[ColumnInfo, ...]:
        """All columns but the label."""
        return tuple(column for column in self.columns if column.name != self.label)
