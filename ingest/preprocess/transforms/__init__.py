"""Which transforms are there? A module holds the options of a transform, its questions about the data, and its application.

Words: `Options` is what a pipeline file writes under the transform's name; a *question* is what it learns from the train split,
and a `ColumnState` what it keeps of the answer.
Public: for transforms of other packages (docs/extend/transform.md) `Transform`, the types `Columns` and `Names` for its
options, and `Question`, `ColumnFacts`, `ColumnState`, `Rows`, `Functions`. `registry.TRANSFORMS` holds all by name.
"""

from penstock.ingest.preprocess.learnt import ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Names, Transform

__all__ = ["ColumnFacts", "ColumnNames", "ColumnState", "Functions", "Names", "Question", "Rows", "Transform"]
