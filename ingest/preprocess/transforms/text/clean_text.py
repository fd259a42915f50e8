"""How does text come to one spelling, so that a category or a word is one and not several?"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import field_validator

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_text
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Transform
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml

__all__ = ["CleanText", "CleanTextOptions"]


class CleanTextOptions(Section):
    """Text columns and what is done to them, in the order of the options below. A null stays null."""

    columns: ColumnNames
    """Names, or `*` for every text column but the label."""
    normalize: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = "NFC"
    """Unicode form, so that one letter is not written in two ways; `NFKC` makes full-width letters and ligatures plain too."""
    lower: bool = False
    """Whether letters become small."""
    remove: str | None = None
    """A regular expression (RE2, as Arrow has it): what it matches becomes a blank, such as `https?://[^ ]+` or `[^a-z ]`."""
    whitespace: bool = True
    """Whether every run of blanks, tabs and line ends becomes one blank, and none is left at the ends."""
    empty_is_null: bool = False
    """Whether text that is empty afterwards becomes null, which an imputer may fill."""

    @field_validator("remove")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
            pc.replace_substring_regex(pa.array([""]), pattern or " ", " ")
        except (re.error, pa.ArrowInvalid) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern


class CleanText(Transform[CleanTextOptions]):
    """Text in one spelling: Unicode form, letters, blanks."""

    Options = CleanTextOptions

    def matches(self, kind: pa.DataType) -> bool:
        return is_text(kind)

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        return None if is_text(kind) else f"it takes text; cast it first (cast: {{{in_yaml(column)}: string}}), or leave it out"

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        for name in self.columns(rows.table.schema, data.label):
            try:
                rows.put(name, self._cleaned(rows.column(name)))
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"preprocess: {self.name}: column {name!r}: {error}", next_step="correct its options"
                ) from error

    def _cleaned(self, text: pa.Array) -> pa.Array:
        of = self.options
        if of.normalize is not None:
            text = _normalized(text, of.normalize)
        if of.lower:
            text = pc.utf8_lower(text)
        if of.remove is not None:
            text = pc.replace_substring_regex(text, of.remove, " ")
        if of.whitespace:
            text = pc.utf8_trim_whitespace(pc.replace_substring_regex(text, r"[\s\p{Z}]+", " "))
        if of.empty_is_null:
            text = pc.if_else(pc.equal(text, ""), pa.scalar(None, text.type), text)
        return text


def _normalized(text: pa.Array, form: Literal["NFC", "NFD", "NFKC", "NFKD"]) -> pa.Array:
    """By Python: Arrow's own leaves letters and accents apart in every form."""
    if pc.all(pc.string_is_ascii(text)).as_py() is not False:
        return text
    encoded = text.dictionary_encode()
    spelt = [unicodedata.normalize(form, value) for value in encoded.dictionary.to_pylist()]
    return pa.array(spelt, text.type).take(encoded.indices)
