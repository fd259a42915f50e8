"""Which files does an output folder have, and which of them count?

`part-<key>.parquet`             rows that were scored
`_unscored/part-<key>.parquet`   rows that were not, with the reason
`_penstock/input.json`           of which input the rows are: an output has one
`_penstock/units/<key>.json`     the record of a unit, deleted before its parts change and written after them
`_penstock/manifest.json`        all records and what they add up to, written when everything is scored
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pyarrow.parquet as pq
from pydantic import Field

from penstock.config import Section
from penstock.errors import SpecError
from penstock.ingest.files.listing import SourceFile
from penstock.storage import Storage

__all__ = ["OWN", "SIDE", "Manifest", "Output", "PredictedUnit", "content_of", "part_name"]

OWN = "_penstock"
"""Readers of Parquet folders skip names that begin with `_`."""

SIDE = "_unscored"

_UNITS, _MANIFEST, _INPUT = f"{OWN}/units", f"{OWN}/manifest.json", f"{OWN}/input.json"

_PART = re.compile(r"part-[0-9a-f]{32}\.parquet")

_READS_AT_ONCE = 16


def part_name(key: str) -> str:
    """Return the file name of a unit's part, in the output and in the side table."""
    return f"part-{key}.parquet"


def content_of(file: SourceFile) -> str:
    """Return what a record keeps of a file's content: it changes when the content does."""
    return f"{file.size_bytes} bytes, {file.fingerprint}"


class PredictedUnit(Section):
    """`<key>.json`: the commit record of a unit."""

    version: Literal[1] = 1
    key: str
    asked: str
    """Digest of the model, the columns and how files are read."""
    model: str
    """Its address, for people."""
    files: dict[str, str]
    """Path below the input -> content of the whole file when it was scored (`content_of`)."""
    piece: tuple[int, int] | None = None
    """First row and end of the rows of the only file that were scored; None for all."""
    rows: int
    """Number of scored rows."""
    unscored: int
    part_bytes: int
    """0 where no row was scored; then there is no part."""
    side_bytes: int
    """0 where every row was scored."""
    unseen: dict[str, int] = Field(default_factory=dict)
    """Column -> number of values that the model took although its train split lacks the category."""
    seconds: float


class Manifest(Section):
    """What the output holds as a whole."""

    version: Literal[1] = 1
    model: str
    model_digest: str
    input: str
    state: str = ""
    """Of a source that is not files, which was read: `version-12`."""
    rows: int
    unscored: int
    data_digest: str
    """Of the names, sizes and contents of the input's files."""
    code_digest: str
    """Of the user's code that the model brings along."""
    units: tuple[PredictedUnit, ...]


class Output:
    """An output folder. One process at a time may change it (`penstock.lease`)."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def refuse_others(self) -> None:
        """Raise SpecError for a folder with files but none of penstock: parts would mix with other data."""
        names = self.storage.list()
        if names and OWN not in names:
            raise SpecError(
                f"--output {self.storage.root} holds {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, and not "
                "predictions of penstock",
                next_step="name a new or an empty folder, or one that an earlier penstock predict has written",
            )

    def manifest(self) -> Manifest | None:
        """Read the manifest of the last complete run; None if there is none that can be read."""
        return self.storage.read_record(_MANIFEST, Manifest)

    def units(self) -> list[PredictedUnit]:
        """Return the committed units whose parts are there with their size."""
        names = [name.removesuffix(".json") for name in self.storage.list(_UNITS) if name.endswith(".json")]
        manifest = self.manifest()
        known = {unit.key: unit for unit in (manifest.units if manifest is not None else ())}
        with ThreadPoolExecutor(1 if self.storage.is_local else _READS_AT_ONCE) as pool:
            found = list(pool.map(lambda key: known.get(key) or self._read(key), names))
        parts, side = self.storage.sizes(), self.storage.sizes(SIDE)
        return [
            unit
            for unit in found
            if unit is not None
            and parts.get(part_name(unit.key), 0) == unit.part_bytes
            and side.get(part_name(unit.key), 0) == unit.side_bytes
        ]

    def _read(self, key: str) -> PredictedUnit | None:
        unit = self.storage.read_record(f"{_UNITS}/{key}.json", PredictedUnit)
        return unit if unit is not None and unit.key == key else None

    def claim(self, digest: str, words: str) -> None:
        """Record the input of the output. The output's lease must be held.

        Args:
            digest: of what names INPUT.
            words: INPUT for people, without secrets.

        Raises:
            SpecError: it holds the rows of another input, which would be taken for earlier ones of this.
        """
        noted = {"version": 1, "input": words, "digest": digest}
        there = self.storage.read_json(_INPUT) if self.storage.exists(_INPUT) else noted
        if there["digest"] != digest and self.storage.list(_UNITS):
            raise SpecError(
                f"--output {self.storage.root} holds the predictions of another input: {there['input']}",
                next_step="name a folder for this input alone, or give INPUT and its options as before (relative ones from the "
                "same folder)",
            )
        if there["digest"] != digest or there is noted:
            self.storage.write_json(_INPUT, noted)

    def example(self, units: Iterable[PredictedUnit]) -> str:
        """Format place and reason of a row of these that could not be scored; empty without one."""
        for unit in units:
            if unit.unscored:
                with self.storage.open(f"{SIDE}/{part_name(unit.key)}", unit.side_bytes) as file:
                    row = pq.ParquetFile(file).read_row_group(0).slice(0, 1).to_pylist()[0]
                return f"{row['file']}, row {row['row']} (from 0): {row['reason']}"
        return ""

    def begin(self, key: str) -> None:
        """Delete the record of a unit before its parts change."""
        self.storage.delete(f"{_UNITS}/{key}.json")

    def commit(self, unit: PredictedUnit) -> None:
        """Write the record of a unit whose parts are in place."""
        self.storage.write_json(f"{_UNITS}/{unit.key}.json", unit.model_dump(mode="json"))

    def withdraw(self, key: str) -> None:
        """Delete the record of a unit, then its parts."""
        for path in (f"{_UNITS}/{key}.json", part_name(key), f"{SIDE}/{part_name(key)}"):
            self.storage.delete(path)

    def reopen(self) -> None:
        """Delete the manifest before the first change, since it means that everything is scored."""
        self.storage.delete(_MANIFEST)

    def remove_strays(self, units: Iterable[PredictedUnit]) -> None:
        """Delete parts without a record, which a kill leaves: their rows are scored again."""
        kept = {part_name(unit.key) for unit in units}
        for folder in ("", SIDE):
            for name in self.storage.sizes(folder):
                if _PART.fullmatch(name) and name not in kept:
                    self.storage.delete(f"{folder}/{name}" if folder else name)

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, unless it is there already."""
        if self.manifest() != manifest:
            self.storage.write_json(_MANIFEST, manifest.model_dump(mode="json"))
