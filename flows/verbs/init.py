"""Make a project: a template's files, and real data that is already on this machine.

Nothing is downloaded: digits and tumours come with scikit-learn; the text is source code of the standard library.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

from penstock.errors import PreflightError, SpecError
from penstock.flows.spec_file import schema_json

__all__ = ["TEMPLATES", "create_project"]

TEXT_TRAIN_CHARS = 800_000

TEXT_TEST_CHARS = 60_000
"""Enough text to train on in half a minute on two cores."""

TEXT_FILE_CHARS = 60_000
"""Larger modules are left out, so that no module makes up most of a split."""

DIGITS_TRAIN_ROWS = 1500

DIGITS_TRAIN_FILES = 6
"""Several files, so that preparing them shows its progress; the rest of the 1,797 digits is the test split."""


def create_project(directory: Path, template: str) -> list[Path]:
    """Write a project that runs as it is, and return its files, pipeline.yaml first.

    The directory is made if absent. It may hold other files, but none that the project would overwrite.

    Raises:
        SpecError: the directory already holds one of the project's files.
        PreflightError: the template's data is not on this machine.
    """
    files = sorted(_template_files(template), key=lambda file: (file[0] != "pipeline.yaml", file[0]))
    if directory.exists() and not directory.is_dir():
        raise SpecError(f"{directory} is a file; a project needs a directory", next_step="give another directory")
    in_the_way = [
        name for name in (*(name for name, _ in files), "pipeline.schema.json", "data") if (directory / name).exists()
    ]
    if in_the_way:
        raise SpecError(
            f"{directory} already holds {', '.join(in_the_way)}, and nothing is overwritten",
            next_step="give another directory, or remove the files first",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(
            f"the folder {directory} cannot be made: {error.strerror}", next_step="give another directory"
        ) from error
    schema = schema_json()  # before anything is written: it imports the packages that add formats and transforms
    # Data first, pipeline.yaml last: a half-written project cannot be run.
    data = TEMPLATES[template](directory / "data")
    written = [_write(directory / "pipeline.schema.json", schema)]
    written += [_write(directory / name, text) for name, text in reversed(files)]
    return [*reversed(written), *data]


def _template_files(template: str) -> Iterator[tuple[str, str]]:
    for entry in resources.files("penstock.flows").joinpath("templates", template).iterdir():
        if entry.is_file():
            yield entry.name, entry.read_text(encoding="utf-8")


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _write_digits(data: Path) -> list[Path]:
    """Write column `image`, 64 numbers of uint8 from 0 to 16, row by row, and column `label`, int64 from 0 to 9."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = digits.data.astype(np.uint8)
    table = pa.table(
        {
            "image": pa.FixedSizeListArray.from_arrays(pa.array(pixels.ravel()), pixels.shape[1]),
            "label": pa.array(digits.target.astype(np.int64)),
        }
    )
    of_file = DIGITS_TRAIN_ROWS // DIGITS_TRAIN_FILES
    parts = [(f"train/part-{number:05d}.parquet", number * of_file, of_file) for number in range(DIGITS_TRAIN_FILES)]
    parts.append(("test/part-00000.parquet", DIGITS_TRAIN_ROWS, len(table) - DIGITS_TRAIN_ROWS))
    for name, start, rows in parts:
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(start, rows), data / name)
    return [data / name for name, _, _ in parts]


def _write_tumours(data: Path) -> list[Path]:
    """Write thirty columns of numbers and `diagnosis`, which is `malignant` or `benign`."""
    from sklearn.datasets import load_breast_cancer

    cases = load_breast_cancer(as_frame=True)
    table = cases.data.rename(columns=lambda name: name.replace(" ", "_"))
    text = table.assign(diagnosis=cases.target_names[cases.target]).to_csv(index=False)
    return [_write(data / "breast_cancer.csv", text)]


def _write_source_text(data: Path) -> list[Path]:
    """Copy modules of the standard library as text files, the same ones on every machine with the same Python."""
    library = Path(sysconfig.get_path("stdlib"))
    # Names that begin with an underscore are left out: readers take such files for markers, as Spark and Hive do.
    modules = _readable(sorted(library.glob("[a-z]*.py")))
    written = []
    for split, wanted_chars in (("train", TEXT_TRAIN_CHARS), ("test", TEXT_TEST_CHARS)):
        chars = 0
        while chars < wanted_chars:
            module = next(modules, None)
            if module is None:
                raise PreflightError(
                    f"{library} has too little source text for the {split} files",
                    next_step="use a Python that ships its .py files, or another template",
                )
            name, text = module
            written.append(_write(data / split / f"{name}.txt", text))
            chars += len(text)
    return written


def _readable(paths: list[Path]) -> Iterator[tuple[str, str]]:
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if 0 < len(text) <= TEXT_FILE_CHARS:
            yield path.stem, text


TEMPLATES: dict[str, Callable[[Path], list[Path]]] = {
    "boosted": _write_tumours,
    "lightning": _write_tumours,
    "images": _write_digits,
    "ray-loop": _write_digits,
    "tabular": _write_tumours,
    "text": _write_source_text,
}
"""Template -> function that writes its data; each has a folder of the same name in flows/templates/."""
