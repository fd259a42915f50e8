"""How is a Lance dataset read? At one version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from penstock.config import Section
from penstock.ingest.formats.reader import library
from penstock.ingest.formats.sources.kept import KeptFormat, Origin
from penstock.ingest.formats.sources.tables import address_of, naming, object_store_options
from penstock.ingest.spec import DataSpec

__all__ = ["LanceFormat", "LanceOptions"]


class LanceOptions(Section):
    """Which state of a Lance dataset is read. `data.train` is its folder or URL."""

    version: PositiveInt | None = None
    """The version; without it the newest one, as it is when a run begins."""


class LanceFormat(KeptFormat):
    """A Lance dataset at one version, which is part of the key; its rows are copied to the storage once."""

    pins = ("version",)
    folder_columns = False
    Options = LanceOptions

    def origin(self, data: DataSpec, target: str, base_dir: Path, code_files: Sequence[str]) -> Origin:
        """Return the dataset, known by its version and when that was made, since it has no id."""
        uri, wanted = address_of(target, base_dir), data.__dict__["lance"].version
        with naming("Lance dataset", uri):
            dataset = _dataset(uri, wanted)
            version = dataset.version
            made = next(str(each["timestamp"]) for each in dataset.versions() if each["version"] == version)
            identity = ["lance", version, made, str(dataset.schema), dataset.count_rows()]
        return Origin(identity, dataset.to_batches, f"version-{version}", reading=lambda: naming("Lance dataset", uri))


def _dataset(uri: str, version: int | None) -> Any:
    lance = library("lance", "lance", "lance")
    return lance.dataset(uri, version=version, storage_options=object_store_options(uri))
