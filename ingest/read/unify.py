"""Do all files of a source agree on their columns and types? If so, on which; if not, which file differs, and where in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from penstock.config import Section
from penstock.errors import DataError, SpecError
from penstock.ingest.columns.casts import promote
from penstock.ingest.columns.type_text import has_type_text, parse_type, type_text
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.cell_types import missing_advice
from penstock.ingest.formats.reader import FileFacts, Reader
from penstock.ingest.formats.registry import format_of
from penstock.ingest.spec import PATH, DataSpec, SplitRule
from penstock.messages import capped, counted, did_you_mean, in_yaml

__all__ = ["SourceColumn", "columns_in", "given_types", "misnamed", "refuse_names", "unify"]

_NAMED_FILES = 3


def given_types(data: DataSpec) -> dict[str, pa.DataType]:
    """Return `data.types` as Arrow types. Raises SpecError listing every text that is not a type."""
    types, problems = {}, []
    for name, text in data.types.items():
        try:
            types[name] = parse_type(text)
        except ValueError as error:
            problems.append(f"data.types.{name}: {error}")
    if problems:
        raise SpecError(f"{counted(len(problems), 'type')} of data.types cannot be read", problems=problems)
    return types


class SourceColumn(Section):
    """One column of the source."""

    name: str
    type: str
    """Arrow type as text (penstock.ingest.columns.type_text)."""
    from_folder: bool = False
    """Whether the value is in the folders' names (`month=2011-01/`), not in the files."""


def unify(data: DataSpec, reader: Reader, files: Sequence[SourceFile], facts: Sequence[FileFacts]) -> list[SourceColumn]:
    """Return the columns of the dataset with their types, in the order of `data.columns` or else of the files.

    Raises:
        SpecError: the pipeline file names a column that no file has.
        DataError: files disagree; every disagreement is listed with the files and the cure.
    """
    in_files = {name for fact in facts for name in fact.columns}
    with_folders = format_of(data).folder_columns
    columns_of = [
        _with_folders(file, fact, in_files) if with_folders else fact.columns for file, fact in zip(files, facts, strict=True)
    ]
    present = dict.fromkeys(name for columns in columns_of for name in columns)
    refuse_names(misnamed(data, list(present)), list(present))
    types = given_types(data)
    problems: list[str] = []
    strays: list[str] = []
    missing = False
    to_set: dict[str, str] = {}
    unified: list[SourceColumn] = []
    for name in present if data.read_columns is None else [name for name in data.read_columns if name in present]:
        having = [index for index, columns in enumerate(columns_of) if name in columns]
        if len(having) < len(files) and not reader.missing_is_null and data.missing_columns == "error":
            problems.append(_missing(name, files, having))
            missing = True
            continue
        found: dict[pa.DataType, list[int]] = {}
        for index in having:
            found.setdefault(columns_of[index][name], []).append(index)
        if odd := next((kind for kind in found if not has_type_text(kind)), None):
            problems.append(
                f"column {name!r} is {odd} in {_names(files, found[odd])}, a type that cannot be read: "
                "leave it out of data.columns, or write it as another"
            )
            continue
        kind = types.get(name) or _common(list(found))
        if name == data.label and name not in types and (mixed := _classes_and_numbers(files, found)):
            raise DataError(
                f"the label {name!r} is {mixed}: integers alone would be classes, and together they are a quantity",
                next_step=f"set it: data.types: {{{in_yaml(name)}: int64}} for classes, "
                f"{{{in_yaml(name)}: float64}} for a quantity",
            )
        if kind is None:
            problems.append(_disagreement(name, files, found) + _places(name, files, facts))
            if not any(map(pa.types.is_nested, found)):
                to_set[name] = "int64" if all(map(_is_whole, found)) else "string"
        else:
            unified.append(SourceColumn(name=name, type=type_text(kind), from_folder=name not in in_files))
            if name not in types and (stray := _stray(name, files, facts)):
                strays.append(stray)
                to_set[name] = "string"
    if problems or strays:
        where = files[0].uri if len(files) == 1 else f"{len(files)} source files"
        given = ", ".join(f"{in_yaml(name)}: {kind}" for name, kind in to_set.items())
        words = [seen.first_text.partition(" holds ")[2] for fact in facts for seen in fact.mostly_numbers.values()]
        repair = missing_advice(words) if any(words) else "repair the rows"
        as_types = f"{repair}; or read the columns as types that hold all of them: data.types: {{{given}}}"
        anew = "write the files again with one readable type for each column, or name the other columns in data.columns"
        as_nulls = "or read nulls where a file lacks a column: data.missing_columns: null"
        cures = {as_types: bool(to_set), anew: len(to_set) < len(problems), as_nulls: missing}
        raise DataError(
            f"{where}: the columns do not fit together" if problems else f"{where}: there is text among numbers",
            problems=capped([*problems, *strays]),
            next_step="; ".join(cure for cure, applies in cures.items() if applies),
        )
    if not unified:
        raise DataError(f"{files[0].uri}: its rows have no columns", next_step="correct data.train or data.columns")
    return unified


def _with_folders(file: SourceFile, facts: FileFacts, in_files: set[str]) -> Mapping[str, pa.DataType]:
    added = {name: parse_type(file.folder_type(name)) for name in file.folder_columns if name not in in_files}
    return {**facts.columns, **added} if added else facts.columns


def columns_in(data: DataSpec, file: SourceFile, facts: FileFacts) -> dict[str, pa.DataType]:
    """Return the columns of one file, as `unify` would have them if it were the only one."""
    found = _with_folders(file, facts, set(facts.columns)) if format_of(data).folder_columns else facts.columns
    return {**found, **{name: kind for name, kind in given_types(data).items() if name in found}}


def misnamed(data: DataSpec, present: list[str]) -> list[str]:
    """Say of every column that the section `data` names and that cannot be used what is wrong; `present` are there."""
    named = [(f"data.columns[{index}]", name) for index, name in enumerate(data.columns or [])]
    named += [(f"data.types.{name}", name) for name in data.types]
    named += [("data.label", data.label)] if data.label else []
    for split in ("validation", "test"):
        rule = getattr(data, split)
        if isinstance(rule, SplitRule):
            named += [(f"data.{split}.by", name) for name in rule.needed_columns if name != PATH or name in present]
    problems = []
    for where, name in named:
        if name not in present:
            problems.append(f"{where}: no file has a column {name!r}{did_you_mean(name, present)}")
        elif data.columns is not None and name not in data.columns and where == "data.label":
            problems.append(f"{where}: column {name!r} is not among data.columns")
    return problems


def refuse_names(problems: list[str], present: list[str]) -> None:
    """Raise SpecError of all problems with the columns that the pipeline file names, if there are any."""
    if problems:
        raise SpecError(
            f"{counted(len(problems), 'column')} named in the pipeline file cannot be used",
            problems=problems,
            next_step=f"the rows have: {', '.join(capped(present))}",
        )


def _common(kinds: list[pa.DataType]) -> pa.DataType | None:
    common: pa.DataType | None = pa.null()
    for kind in kinds:
        common = None if common is None else promote(common, kind)
    return common


def _classes_and_numbers(files: Sequence[SourceFile], found: Mapping[pa.DataType, list[int]]) -> str:
    """Describe which files hold integers and which fractions, if both are there: together they are read as fractions."""
    kinds = {test: [kind for kind in found if test(kind)] for test in (pa.types.is_integer, pa.types.is_floating)}
    if not all(kinds.values()):
        return ""
    return " and ".join(f"{some[0]} in {_names(files, found[some[0]])}" for some in kinds.values())


def _missing(name: str, files: Sequence[SourceFile], having: list[int]) -> str:
    without = [index for index in range(len(files)) if index not in set(having)]
    return f"column {name!r} is missing in {_names(files, without)}, and there in {_names(files, having)}"


def _disagreement(name: str, files: Sequence[SourceFile], found: dict[pa.DataType, list[int]]) -> str:
    kinds = sorted((kind for kind in found if not pa.types.is_null(kind)), key=lambda kind: len(found[kind]))
    return f"column {name!r} is " + " and ".join(f"{kind} in {_names(files, found[kind])}" for kind in kinds)


def _places(name: str, files: Sequence[SourceFile], facts: Sequence[FileFacts]) -> str:
    """Describe the first text of each file whose values are nearly all numbers."""
    odd = [(file, fact.mostly_numbers[name]) for file, fact in zip(files, facts, strict=True) if name in fact.mostly_numbers]
    return "".join(f"; in {file.name}, {seen.first_text}" for file, seen in odd[:_NAMED_FILES])


def _stray(name: str, files: Sequence[SourceFile], facts: Sequence[FileFacts]) -> str:
    """Describe the stray word that turned a column, nearly all numbers over all files, into text."""
    evidence = [(file, fact.mostly_numbers.get(name)) for file, fact in zip(files, facts, strict=True)]
    known = [(file, seen) for file, seen in evidence if seen is not None]
    if len(known) < len(files):
        return ""
    file, seen = known[0]
    numbers, values = sum(seen.numbers for _, seen in known), sum(seen.values for _, seen in known)
    return f"column {name!r} holds numbers in {numbers} of {values} rows; in {file.name}, {seen.first_text}"


def _names(files: Sequence[SourceFile], indices: list[int]) -> str:
    names = ", ".join(files[index].name for index in indices[:_NAMED_FILES])
    more = ", ..." if len(indices) > _NAMED_FILES else ""
    return names if len(indices) == 1 else f"{len(indices)} files ({names}{more})"


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind))
