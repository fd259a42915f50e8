"""How are all files of an input scored? Those that no unit of the output covers, each unit committed by itself; manifest last.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from penstock.config import Section
from penstock.digest import digest_of, file_digest
from penstock.errors import DataError, SpecError
from penstock.ingest.files.listing import Listing, SourceFile, capped, list_location
from penstock.ingest.files.unit_plan import plan_units
from penstock.ingest.formats.reader import FileFacts
from penstock.ingest.formats.registry import format_named, format_origin, reader_of
from penstock.ingest.formats.section import data_spec
from penstock.ingest.read.inspection import inspect_files
from penstock.ingest.read.parsed_rows import forget_parsed
from penstock.ingest.spec import DataSpec
from penstock.messages import counted
from penstock.progress import Progress, silent
from penstock.storage import Storage
from penstock.stores import is_local
from penstock.training.model import ModelSpec
from penstock.training.predict.output import Manifest, Output, PredictedUnit, differing_columns
from penstock.training.predict.unit import FORMAT, ScoringJob, ScoringOutcome
from penstock.training.registry.load import FetchedModel
from penstock.training.registry.loaded_model import MODEL_FILE
from penstock.training.registry.raw_rows import RawForm

__all__ = ["Asked", "Plan", "Scored", "ask", "check_input", "list_input", "plan", "score", "state_of"]


UNIT_BYTES = 8 << 20
"""Files that are one row each are scored in groups of about so many bytes."""


PIECE_BYTES = 256 << 20
"""A file of more than twice this is scored in pieces of about so many bytes, where its format can be read so.

Of text it is known only to who looks through it where its rows begin; that is done here, by several threads."""


@dataclass(frozen=True)
class Asked:
    """What is to be done to every file.

    Attributes:
        model: address of the model, for people.
        model_digest: of the content of all its files.
        code_digest: of the user's code that it brings along.
        data: how the files are read.
        columns: of the source, to be kept; None for all.
        source: digest of what names the rows where they are in no files: a table, a query or a function.
    """

    model: str
    model_digest: str
    code_digest: str
    data: DataSpec
    columns: tuple[str, ...] | None
    source: str = ""

    @property
    def digest(self) -> str:
        """Equal where equal files would give equal rows."""
        # Of rows that are in no files the options say which are meant, and not how the files are read that they become.
        options = () if self.source else (self.data.format,)
        read = self.data.model_dump(mode="json", include={"format", "types", "images", *options})
        return digest_of(
            {
                "format": FORMAT,
                "model": self.model_digest,
                "columns": self.columns,
                **({"source": self.source} if self.source else {}),
                "read": read | ({"version": version} if (version := format_origin(self.data)) else {}),
            }
        )


def ask(
    model: FetchedModel,
    source: str,
    format: str | None,
    columns: Sequence[str],
    options: Mapping[str, Any] | None = None,
    base_dir: Path | None = None,
) -> Asked:
    """What the model is to be asked of the rows at `source`.

    Args:
        format: of the source, if it is not that of the one the model was trained on.
        columns: of the source, to be kept; empty for all.
        options: of the format, beside those that the model was trained with, if it is that format.
        base_dir: where relative paths start; by default the working directory.

    Raises:
        DataError: the model takes prepared rows only.
        SpecError: there is no such format, or an option of it is wrong or missing.
    """
    spec = ModelSpec.model_validate_json((model.folder / MODEL_FILE).read_bytes())
    if spec.raw is None:
        raise DataError(
            f"{model.uri} takes prepared rows only: it was registered without what prepares raw ones",
            next_step="train and register it again with this version of penstock",
        )
    form = RawForm.model_validate(spec.raw)
    name = format or form.data.format
    is_kept = format_named(name).is_kept
    if not is_kept and is_local(source):
        source = os.path.abspath((base_dir or Path()) / os.path.expanduser(source.removeprefix("file://")))
    own = {"train": source, "validation": None, "test": None, "label": None, "columns": None}
    given = _options(name, form.data if name == form.data.format else None, options or {})
    if name == form.data.format:
        types = {k: v for k, v in form.data.types.items() if k not in form.columns}
        data = form.data.model_copy(update={**own, "types": types, **given})
    else:
        data = data_spec((name,))(format=name, train=source, images=form.data.images).model_copy(update=given)
    files = sorted(path for path in model.folder.rglob("*") if path.is_file())
    content = [[path.relative_to(model.folder).as_posix(), file_digest(path)] for path in files]
    code = {"model": spec.code.digest, **{target: user.digest for target, user in sorted(form.code.items())}}
    named = digest_of([name, source]) if is_kept else ""
    return Asked(model.uri, digest_of(content), digest_of(code), data, tuple(columns) or None, named)


def _options(name: str, trained_on: DataSpec | None, given: Mapping[str, Any]) -> dict[str, Section]:
    """The format's options, if it has any, as a field of the section: those trained with, but for which state was read."""
    form = format_named(name)
    if form.Options is None:
        if given:
            raise SpecError(f"--option {next(iter(given))}: the format {name} has no options", next_step="leave --option out")
        return {}
    before = None if trained_on is None else getattr(trained_on, name)
    begin = {} if before is None else before.model_dump(mode="json", exclude=set(form.pins), exclude_unset=True)
    try:
        return {name: form.Options.model_validate({**begin, **given})}
    except ValidationError as error:
        raise SpecError(
            f"the options of the format {name} are not right",
            problems=[f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()],
            next_step=f"say each as under data.{name} of a pipeline file: --option NAME=VALUE",
        ) from error


def list_input(data: DataSpec) -> Listing:
    """The files to be scored. Raises as `list_location`."""
    listing = list_location(data.format, format_named(data.format).extensions, Path.cwd(), data.train, called="INPUT")
    if not any(file.size_bytes for file in listing.files):
        raise DataError(f"INPUT: the files of {data.train} are empty (zero bytes)", next_step="write them again")
    return listing


class Plan(NamedTuple):
    """What is there, and what is left."""

    kept: list[PredictedUnit]
    """Units that stay: of files as they are, or of files that are no longer in the input."""
    replaced: list[PredictedUnit]
    """Units of files that are scored anew, or twice."""
    todo: list[ScoringJob]
    gone: list[str]
    """Names of files that the output has rows of and the input has no longer."""
    superseded: list[PredictedUnit]
    """Units of another state of the table, query or function that is scored: they stay until all of its rows are scored."""


def plan(output: Output, asked: Asked, files: Sequence[SourceFile], progress: Progress = silent) -> Plan:
    """Compare the units of the output with the files there are now.

    Args:
        progress: of the look through large files of text.
    """
    present = {file.name: (file.name, file.size_bytes, file.fingerprint) for file in files}
    kept: list[PredictedUnit] = []
    replaced: list[PredictedUnit] = []
    covered: set[tuple[str, tuple[int, int] | None]] = set()
    for unit in output.units():
        here = {(one.name, one.piece) for one in unit.files if one.name in present and unit.source == asked.source}
        same = all(present[one.name] == one.content for one in unit.files if one.name in present)
        current = unit.asked == asked.digest and same and not here & covered
        (kept if current or not here else replaced).append(unit)
        covered |= here if current else set()
    superseded = [
        unit for unit in kept if asked.source == unit.source != "" and all(one.name not in present for one in unit.files)
    ]
    kept = [unit for unit in kept if unit not in superseded]
    covered |= {(name, None) for name in _whole_files(unit for unit in kept if unit.source == asked.source)}
    gone = sorted({one.name for unit in kept for one in unit.files if one.name not in present or unit.source != asked.source})
    left = [file for file in files if (file.name, None) not in covered and file.size_bytes]
    todo = list[ScoringJob]()
    for of_unit, piece, facts in _units(asked.data, left, progress):
        if (of_unit[0].name, piece) not in covered:
            todo.append(
                ScoringJob(
                    of_unit,
                    asked.data,
                    asked.columns,
                    asked.digest,
                    asked.model,
                    output.storage,
                    piece,
                    source=asked.source,
                    facts=facts,
                )
            )
        elif facts is not None:
            forget_parsed(asked.data, asked.data.format, of_unit, piece)
    return Plan(kept, replaced, todo, gone, superseded)


def _whole_files(units: Iterable[PredictedUnit]) -> Iterator[str]:
    """Names of the files whose pieces are all there, so that nobody need look where they begin."""
    found: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for unit in units:
        for one in unit.files if unit.file_rows is not None else ():
            if one.piece is not None:
                found.setdefault((one.name, unit.file_rows or 0), set()).add(one.piece)
    for (name, rows), pieces in found.items():
        begins, ends = zip(*sorted(pieces), strict=True)
        if (*begins, rows) == (0, *ends):
            yield name


_Unit = tuple[tuple[SourceFile, ...], tuple[int, int] | None, FileFacts | None]
"""Files, the piece that is meant of the only one, and what is known of that one."""


def _units(data: DataSpec, files: Sequence[SourceFile], progress: Progress) -> Iterator[_Unit]:
    reader = reader_of(data)
    if reader.one_row_per_file:
        yield from ((unit, None, None) for unit in plan_units(files, UNIT_BYTES))
        return
    for file in files:
        pieces: Sequence[tuple[int, int]] = ()
        facts: FileFacts | None = None
        if file.size_bytes > 2 * PIECE_BYTES:
            with contextlib.suppress(DataError):  # the worker meets it again, and tells
                pieces = reader.pieces(file, PIECE_BYTES)
                if not pieces and reader.hands_on_rows:
                    (looked,) = inspect_files(data, [file], progress, part_bytes=PIECE_BYTES, keep=True)
                    if isinstance(looked, FileFacts):
                        facts, file = looked, file.model_copy(update={"rows": looked.rows, "cuts": looked.cuts})
                        pieces = reader.pieces(file, PIECE_BYTES)
        yield from (((file,), piece, facts) for piece in (pieces if len(pieces) > 1 else (None,)))


@dataclass
class Scored:
    """What a run has done so far.

    Attributes:
        unseen: column -> its values that the model took though its train split has no such category.
        problems: files that cannot be read.
    """

    units: int = 0
    rows: int = 0
    unscored: int = 0
    unseen: Counter[str] = field(default_factory=Counter)
    problems: list[DataError] = field(default_factory=list)
    manifest: Manifest | None = None
    warnings: list[str] = field(default_factory=list)


def score(
    output: Output,
    asked: Asked,
    files: Sequence[SourceFile],
    work: Plan,
    run: Callable[[Sequence[ScoringJob]], Iterator[ScoringOutcome]],
    progress: Progress,
    scored: Scored,
) -> None:
    """Score what is left, replace what has changed, write the manifest. The output's lease must be held.

    Args:
        run: scores units, in any order, each committed when it comes.
        scored: told what is done, also where this ends with an error.

    Raises:
        DataError: files cannot be read; all others are scored then, and the manifest is not written.
    """
    if work.todo or work.replaced or work.superseded:
        output.reopen()
    output.remove_strays([*work.kept, *work.replaced, *work.superseded])
    made: list[PredictedUnit] = []
    failed: set[str] = set()
    waiting = Counter(file.name for job in work.todo for file in job.files)
    replaced: dict[str, list[PredictedUnit]] = defaultdict(list)
    for unit in work.replaced:
        for one in unit.files:
            replaced[one.name].append(unit)
    withdrawn: set[str] = set()

    def withdraw(units: Iterable[PredictedUnit]) -> None:
        for unit in units:
            names = {one.name for one in unit.files}
            if unit.key not in withdrawn and not failed & names and not any(waiting[name] for name in names):
                output.withdraw(unit.key)
                withdrawn.add(unit.key)

    for done, outcome in enumerate(run(work.todo) if work.todo else (), start=1):
        if outcome.unit is None:
            scored.problems += [outcome.problem] if outcome.problem is not None else []
            failed |= {file.name for file in outcome.job.files}
        else:
            made.append(outcome.unit)
            scored.units += 1
            scored.rows += outcome.unit.rows
            scored.unscored += outcome.unit.unscored
            scored.unseen.update(outcome.unit.unseen)
        waiting.subtract(file.name for file in outcome.job.files)
        # At once, not when all is done: until then a reader of the folder meets old rows beside the new.
        for file in outcome.job.files:
            withdraw(replaced[file.name])
        progress(done, len(work.todo), "units", counted(scored.rows, "row"))
    units = sorted([*work.kept, *made], key=lambda unit: (unit.files[0].name, unit.files[0].piece or (0, 0), unit.key))
    withdraw(work.replaced)
    scored.warnings += _warnings(work, asked, units, scored)
    if scored.problems:
        raise _unreadable(scored.problems, len(files), scored.warnings)
    withdraw(work.superseded)
    scored.manifest = Manifest(
        model=asked.model,
        model_digest=asked.model_digest,
        input=asked.data.train,
        state=state_of(files),
        rows=sum(unit.rows for unit in units),
        rows_of=_rows_of(units),
        unscored=sum(unit.unscored for unit in units),
        data_digest=digest_of(sorted([file.name, file.size_bytes, file.fingerprint] for file in files)),
        code_digest=asked.code_digest,
        units=tuple(units),
    )
    output.finish(scored.manifest)


def _rows_of(units: Iterable[PredictedUnit]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for unit in units:
        counts[unit.model] += unit.rows
    return dict(sorted(counts.items()))


def _warnings(work: Plan, asked: Asked, units: Sequence[PredictedUnit], scored: Scored) -> list[str]:
    found = []
    if work.gone:
        found.append(
            f"{counted(len(work.gone), 'file is', 'files are')} no longer in INPUT, and their rows stay in the output as they "
            f"are{_of_others(asked, units)}: {', '.join(capped(work.gone, 3))}"
        )
    if scored.unscored:
        found.append(f"{counted(scored.unscored, 'row', 'rows')} could not be scored; the side table _unscored says why")
    if scored.unseen:
        columns = capped([f"{name} ({count:,})" for name, count in sorted(scored.unseen.items())], 5)
        values = counted(scored.unseen.total(), "value is a category", "values are categories")
        found.append(f"{values} that the train split does not have: {', '.join(columns)}")
    if differing := differing_columns(units):
        found.append(f"columns are not of one type in all parts: {'; '.join(capped(differing, 5))}")
    return found


def _of_others(asked: Asked, units: Iterable[PredictedUnit]) -> str:
    others = sorted({unit.model for unit in units if unit.asked != asked.digest} - {asked.model})
    return f", scored by {', '.join(others)} and not by {asked.model}" if others else ""


def _unreadable(problems: Sequence[DataError], num_files: int, warnings: Sequence[str]) -> DataError:
    steps = list(dict.fromkeys(_here(problem.next_step) for problem in problems if problem.next_step))
    advice = "; ".join([*capped(steps, 3), "then run the same command again: what is scored stays"])
    if len(problems) == 1:
        return DataError(problems[0].message, problems=warnings, next_step=advice)
    return DataError(
        f"{len(problems)} of {num_files} files cannot be scored; the others are",
        problems=[*capped([problem.message for problem in problems]), *warnings],
        next_step=advice,
    )


def _here(next_step: str) -> str:
    """There is no `data` section to be set: how files are read is the model's."""
    return "write the file as those are that the model was trained on" if next_step.startswith("set data.") else next_step


def state_of(files: Sequence[SourceFile]) -> str:
    """Of a table that was read at one version, which: `version-12`. Empty of a source that has none."""
    return ", ".join(sorted({file.state for file in files if file.state}))


def check_input(source: str, output: Storage) -> None:
    """Raise SpecError for an output within the input: the next run would take the parts for files to score."""
    inside = Storage(source.rstrip("/") or "/").root
    if f"{output.root}/".startswith(f"{inside}/"):
        raise SpecError(
            f"--output {output.root} lies in INPUT, {source}", next_step="name a folder beside the input, or elsewhere"
        )
