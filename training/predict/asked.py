"""Which rows are scored by which model? Format and options of the input, and the columns to keep."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.config import Section
from penstock.digest import digest_of, file_digest
from penstock.errors import SpecError
from penstock.ingest.files.listing import Listing, SourceFile, list_location
from penstock.ingest.formats.registry import format_named, format_origin
from penstock.ingest.formats.section import data_spec
from penstock.ingest.spec import DataSpec
from penstock.redact import redact_text
from penstock.storage import Storage
from penstock.stores import is_local
from penstock.training.model import read_spec
from penstock.training.predict.unit import FORMAT
from penstock.training.registry.load import FetchedModel
from penstock.training.registry.loaded_model import MODEL_FILE, form_of
from penstock.training.registry.raw_rows import RawForm

__all__ = ["Asked", "ask", "check_input", "list_input", "state_of"]


@dataclass(frozen=True)
class Asked:
    """What is done to every file.

    Attributes:
        model: address of the model, for people.
        model_digest: of the content of all its files.
        code_digest: of the user's code that it brings along.
        data: how the files are read.
        columns: of the source, to be kept; None for all.
        input_digest: of all that names INPUT: its address, and for rows in no files the options but those that pin a state.
        is_kept: whether the rows are in no files: a table, a query or a function.
    """

    model: str
    model_digest: str
    code_digest: str
    data: DataSpec
    columns: tuple[str, ...] | None
    input_digest: str
    is_kept: bool

    @property
    def digest(self) -> str:
        """Equal if equal files give equal rows."""
        # Options of a table, query or function name the rows; their copy in files is read without them.
        options = () if self.is_kept else (self.data.format,)
        read = self.data.model_dump(mode="json", include={"format", "types", "images", *options})
        return digest_of(
            {
                "format": FORMAT,
                "model": self.model_digest,
                "columns": self.columns,
                "read": read | ({"version": version} if (version := format_origin(self.data)) else {}),
            }
        )


def ask(
    model: FetchedModel, source: str, format: str | None, columns: Sequence[str], options: Mapping[str, Any] | None = None
) -> Asked:
    """Combine the model, the rows at `source` and the columns to keep.

    Args:
        format: of the source, if it is not that of the one the model was trained on.
        columns: of the source, to be kept; empty for all.
        options: of the format, beside those that the model was trained with, if it is that format.

    Raises:
        DataError: the model has no description of raw rows.
        SpecError: there is no such format, or an option of it is wrong or missing.
    """
    spec = read_spec(model.folder / MODEL_FILE)
    form = form_of(spec)
    name = format or form.data.format
    is_kept = format_named(name).is_kept
    if not is_kept and is_local(source):
        source = os.path.abspath(os.path.expanduser(source.removeprefix("file://")))
    data = _section(source, name, form, options or {})
    files = sorted(path for path in model.folder.rglob("*") if path.is_file())
    content = [[path.relative_to(model.folder).as_posix(), file_digest(path)] for path in files]
    code = {"model": spec.code.digest, **{target: user.digest for target, user in sorted(form.code.items())}}
    named = [source.rstrip("/")]
    if is_kept:
        named += [name, os.getcwd() if is_local(source) else "", _expanded(getattr(data, name), name)]
    return Asked(model.uri, digest_of(content), digest_of(code), data, tuple(columns) or None, digest_of(named), is_kept)


def _expanded(options: Section | None, name: str) -> str:
    """Return the options that name the rows, with environment variables but without secrets, since a password may change."""
    named = {} if options is None else options.model_dump(mode="json", exclude=set(format_named(name).pins))
    return redact_text(re.sub(r"\$(\w+)", lambda found: os.environ.get(found[1], ""), json.dumps(named, sort_keys=True)))


def _section(source: str, name: str, form: RawForm, given: Mapping[str, Any]) -> DataSpec:
    """Return the section `data` that reads INPUT: of the format of the training with its options but for a pinned state."""
    kind, trained = format_named(name), form.data if name == form.data.format else None
    section: dict[str, Any] = {"format": name, "train": source, "images": form.data.images}
    if trained is not None:
        section["types"] = {column: text for column, text in trained.types.items() if column not in form.columns}
    if kind.Options is not None:
        before: Section | None = getattr(trained, name, None)
        begin = {} if before is None else before.model_dump(mode="json", exclude=set(kind.pins), exclude_unset=True)
        section[name] = {**begin, **given}
    elif given:
        raise SpecError(f"--option {next(iter(given))}: the format {name} has no options", next_step="leave --option out")
    try:
        return data_spec((name,)).model_validate(section)
    except ValidationError as error:
        raise SpecError(
            f"the options of the format {name} are wrong",
            problems=[f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()],
            next_step=f"write each as under data.{name} of a pipeline file: --option NAME=VALUE",
        ) from error


def list_input(data: DataSpec) -> Listing:
    """List the files to score.

    Raises:
        DataError: INPUT is missing, or holds no file of the format.
        ServiceError: as `list_location`.
    """
    return list_location(data.format, format_named(data.format).extensions, Path.cwd(), data.train, called="INPUT")


def state_of(files: Sequence[SourceFile]) -> str:
    """Return the state of a table that was read, such as `version-12`; empty for other sources."""
    return ", ".join(sorted({file.state for file in files if file.state}))


def check_input(source: str, output: Storage) -> None:
    """Raise SpecError for an output inside the input: the next run would score its parts."""
    inside = Storage(source.rstrip("/") or "/").root
    if f"{output.root}/".startswith(f"{inside}/"):
        raise SpecError(
            f"--output {output.root} lies in INPUT, {source}", next_step="name a folder beside the input, or elsewhere"
        )
