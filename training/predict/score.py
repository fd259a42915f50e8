"""How are all files of an input scored? Files without a committed unit are scored unit by unit; the manifest comes last.

Runs on the driver.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.digest import digest_of
from penstock.errors import DataError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.unit_plan import plan_units
from penstock.ingest.formats.registry import reader_of
from penstock.ingest.spec import DataSpec
from penstock.messages import capped, combine_errors, counted
from penstock.progress import Progress
from penstock.redact import redact_text
from penstock.training.predict.asked import Asked, state_of
from penstock.training.predict.output import Manifest, Output, PredictedUnit, content_of
from penstock.training.predict.unit import ScoringJob

__all__ = ["Plan", "Scored", "plan", "score"]

UNIT_BYTES = 8 << 20
"""Files of one row each are scored in groups of about this many bytes."""

PIECE_BYTES = 256 << 20
"""A file of more than twice this is scored in pieces of about this many bytes, if its format names where rows begin."""


class Plan(NamedTuple):
    """Which units stay, and which are scored."""

    kept: list[PredictedUnit]
    """Units that stay: of files as they are, or of files that are no longer in the input."""
    stale: list[PredictedUnit]
    """Units that go once all is scored: of files that are scored again, or of an earlier state of a table or query."""
    todo: list[ScoringJob]
    gone: list[str]
    """Names of files whose rows are in the output and that are no longer in the input."""


def plan(output: Output, asked: Asked, files: Sequence[SourceFile]) -> Plan:
    """Compare the units of the output with the files of the input."""
    present = {file.name: content_of(file) for file in files}
    kept: list[PredictedUnit] = []
    stale: list[PredictedUnit] = []
    covered: set[tuple[str, tuple[int, int] | None]] = set()
    for unit in output.units():
        here = {(name, unit.piece) for name in unit.files if name in present}
        if not here:
            (stale if asked.is_kept else kept).append(unit)
            continue
        same = all(present[name] == unit.files[name] for name, _ in here)
        current = unit.asked == asked.digest and same and not here & covered
        (kept if current else stale).append(unit)
        covered |= here if current else set()
    gone = sorted({name for unit in kept for name in unit.files if name not in present})
    left = [file for file in files if (file.name, None) not in covered]
    todo = list[ScoringJob]()
    for of_unit, piece in _units(asked.data, left):
        if (of_unit[0].name, piece) not in covered:
            todo.append(ScoringJob(of_unit, asked.data, asked.columns, asked.digest, asked.model, output.storage, piece))
    return Plan(kept, stale, todo, gone)


def _units(data: DataSpec, files: Sequence[SourceFile]) -> Iterator[tuple[tuple[SourceFile, ...], tuple[int, int] | None]]:
    """Yield the files of each unit, and the piece, if it is one of a single file."""
    reader = reader_of(data)
    if reader.one_row_per_file:
        yield from ((unit, None) for unit in plan_units(files, UNIT_BYTES))
        return
    for file in files:
        pieces: Sequence[tuple[int, int]] = ()
        if file.size_bytes > 2 * PIECE_BYTES:
            with contextlib.suppress(DataError):  # the worker meets it again, and reports it
                pieces = reader.pieces(file, PIECE_BYTES)
        yield from (((file,), piece) for piece in (pieces if len(pieces) > 1 else (None,)))


@dataclass
class Scored:
    """The counts of a run.

    Attributes:
        unseen: column -> number of values that the model took although its train split lacks the category.
    """

    units: int = 0
    rows: int = 0
    unscored: int = 0
    unseen: Counter[str] = field(default_factory=Counter)
    manifest: Manifest | None = None
    warnings: list[str] = field(default_factory=list)


def score(
    output: Output,
    asked: Asked,
    files: Sequence[SourceFile],
    work: Plan,
    run: Callable[[Sequence[ScoringJob]], Iterator[PredictedUnit | DataError]],
    progress: Progress,
    scored: Scored,
) -> None:
    """Score what is left, replace changed files, write the manifest. The output's lease must be held.

    Args:
        run: scores units, in any order, each committed when its record comes.
        scored: is counted up, also if this ends with an error.

    Raises:
        DataError: files cannot be read; all others are scored then, and the manifest is not written.
    """
    if work.todo or work.stale:
        output.reopen()
    output.remove_strays([*work.kept, *work.stale])
    made, problems = list[PredictedUnit](), list[DataError]()
    for done, unit in enumerate(run(work.todo) if work.todo else (), start=1):
        if isinstance(unit, DataError):
            problems.append(unit)
        else:
            made.append(unit)
            scored.units += 1
            scored.rows += unit.rows
            scored.unscored += unit.unscored
            scored.unseen.update(unit.unseen)
        progress(done, len(work.todo), "units", counted(scored.rows, "row"))
    units = sorted([*work.kept, *made], key=lambda unit: (min(unit.files), unit.piece or (0, 0), unit.key))
    scored.warnings += _warnings(work, scored, output.example(made))
    if problems:
        raise _unreadable(problems, len(files), scored.warnings)
    for key in {unit.key for unit in work.stale} - {unit.key for unit in made}:  # those made took the place of the old parts
        output.withdraw(key)
    scored.manifest = Manifest(
        model=asked.model,
        model_digest=asked.model_digest,
        input=redact_text(asked.data.train),
        state=state_of(files),
        rows=sum(unit.rows for unit in units),
        unscored=sum(unit.unscored for unit in units),
        data_digest=digest_of(sorted([file.name, file.size_bytes, file.fingerprint] for file in files)),
        code_digest=asked.code_digest,
        units=tuple(units),
    )
    output.finish(scored.manifest)


def _warnings(work: Plan, scored: Scored, unscored: str) -> list[str]:
    found = []
    if work.gone:
        found.append(
            f"{counted(len(work.gone), 'file is', 'files are')} no longer in INPUT, and their rows stay in the output as they "
            f"are: {', '.join(capped(work.gone, 3))}"
        )
    if scored.unscored:
        rows = counted(scored.unscored, "row")
        found.append(f"{rows} could not be scored, such as {unscored}; the side table _unscored has all reasons")
    if scored.unseen:
        columns = capped([f"{name} ({count:,})" for name, count in sorted(scored.unseen.items())], 5)
        values = counted(scored.unseen.total(), "value is a category", "values are categories")
        found.append(f"{values} that the train split does not have: {', '.join(columns)}")
    return found


def _unreadable(problems: Sequence[DataError], num_files: int, warnings: Sequence[str]) -> DataError:
    whole = combine_errors(problems, f"{len(problems)} of {num_files} files cannot be scored; the others are")
    steps = list(dict.fromkeys(_here(step) for step in whole.next_step.split("; ") if step))
    return DataError(
        whole.message,
        problems=[*capped([*whole.problems]), *warnings],
        next_step="; ".join([*capped(steps, 3), "then run the same command again: what is scored stays"]),
    )


def _here(next_step: str) -> str:
    """Replace advice on the `data` section: the model decides how files are read."""
    return "write the file as those are that the model was trained on" if next_step.startswith("set data.") else next_step
