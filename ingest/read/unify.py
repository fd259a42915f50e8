"""Do all files of a source agree on their columns and types? If so, on which; if not, which file differs, and where in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from penstock.errors import DataError, SpecError
from penstock.ingest.columns.casts import is_list, promote
from penstock.ingest.columns.type_text import has_type_text, parse_type, type_text
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.reader import FileFacts, Reader
from penstock.ingest.formats.registry import format_of
from penstock.ingest.spec import PATH, DataSpec, SplitRule
from penstock.messages import capped, counted, did_you_mean, in_yaml

__all__ = ["UnifiedColumn", "columns_in", "given_types", "misnamed", "refuse_names", "unify"]


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


class UnifiedColumn(NamedTuple):
    """A column as all files have it."""

    name: str
    kind: pa.DataType
    from_folder: bool
    """Whether the folders' names give its value, and no file does."""


def unify(data: DataSpec, reader: Reader, files: Sequence[SourceFile], facts: Sequence[FileFacts]) -> list[UnifiedColumn]:
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
    apart = rows_named = missing = False
    to_set: dict[str, str] = {}
    unified: list[UnifiedColumn] = []
    for name in present if data.read_columns is None else [name for name in data.read_columns if name in present]:
        having = [index for index, columns in enumerate(columns_of) if name in columns]
        if len(having) < len(files) and not reader.missing_is_null and data.missing_columns == "error":
            problems.append(_missing(name, files, having))
            apart = missing = True
            continue
        found: dict[pa.DataType, list[int]] = {}
        for index in having:
            found.setdefault(columns_of[index][name], []).append(index)
        if odd := next((kind for kind in found if not has_type_text(kind)), None):
            problems.append(
                f"column {name!r} is {odd} in {_names(files, found[odd])}, a type that cannot be read: "
                "leave it out of data.columns, or write it as another"
            )
            apart = True
            to_set[name] = ""
            continue
        kind = types.get(name) or _common(list(found))
        if name == data.label and name not in types and (mixed := _classes_and_numbers(files, found)):
            raise DataError(
                f"the label {name!r} is {mixed}: integers alone would be classes, and together they are a quantity",
                next_step=f"set it: data.types: {{{in_yaml(name)}: int64}} for classes, "
                f"{{{in_yaml(name)}: float64}} for a quantity",
            )
        if kind is None:
            places = _places(name, files, facts)
            problems.append(_disagreement(name, files, found) + places)
            apart = True
            rows_named = rows_named or bool(places)
            to_set[name] = _type_to_set(list(found))
        else:
            unified.append(UnifiedColumn(name, kind, name not in in_files))
            stray = "" if name in types else _stray(name, files, facts)
            if stray:
                problems.append(stray)
                rows_named = True
                to_set[name] = "string"
    if problems:
        where = files[0].uri if len(files) == 1 else f"{len(files)} source files"
        raise DataError(
            f"{where}: the columns do not fit together" if apart else f"{where}: there is text among numbers",
            problems=capped(problems),
            next_step=_cure(to_set, rows_named, missing),
        )
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


def _type_to_set(kinds: list[pa.DataType]) -> str:
    """Return the type of `data.types` as which a column may be read whose files disagree; "" where no type does."""
    kinds = [kind for kind in kinds if not pa.types.is_null(kind)]
    if all(map(_is_whole, kinds)):
        return "int64"
    if not any(map(pa.types.is_nested, kinds)):
        return "string"
    if not all(map(is_list, kinds)):
        return ""
    inner = _common([kind.value_type for kind in kinds])
    return "" if inner is None else type_text(pa.list_(inner))


def _cure(to_set: dict[str, str], rows_named: bool, missing: bool) -> str:
    given = {name: f"{in_yaml(name)}: {in_yaml(kind)}" for name, kind in to_set.items()}
    whole = ", ".join(given[name] for name, kind in to_set.items() if kind == "int64")
    text = ", ".join(given[name] for name, kind in to_set.items() if kind == "string")
    lists = ", ".join(given[name] for name, kind in to_set.items() if kind not in ("int64", "string", ""))
    rest = ", ".join(name for name, kind in to_set.items() if not kind)
    cures = []
    if missing:
        cures.append(
            "write the files again with the same columns, name those all files have in data.columns, or read nulls where a "
            "file lacks one: data.missing_columns: null"
        )
    if whole:
        cures.append(f"set a type for the integers that holds all of them: data.types: {{{whole}}}")
    if text:
        cures.append(
            f"{'repair the rows named above, or ' if rows_named else ''}read the columns as text: data.types: {{{text}}}; or "
            "give such columns their type there and set the rows aside (data.invalid: quarantine)"
        )
    if lists:
        cures.append(f"set a type for the lists: data.types: {{{lists}}}")
    if rest:
        cures.append(f"write the files again with one type of {rest} that can be read, or leave it out of data.columns")
    return "; ".join(cures)


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind))
