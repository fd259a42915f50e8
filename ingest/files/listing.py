"""Which files does a pipeline read, and has one of them changed? Listing of a path, directory, glob or URL.

Clutter that other tools leave behind (`_SUCCESS`, `.crc`, hidden files, README, checksums) is never data. A directory gives the
files whose extension belongs to the format, and those without any; a glob or a single file gives what it names. What is left
out and is not known as clutter is reported: its rows may be missed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import GenericAlias
from typing import Any, Literal, NamedTuple, cast
from unicodedata import normalize
from urllib.parse import unquote

from fsspec.spec import AbstractFileSystem
from pydantic import TypeAdapter

from penstock.config import Section
from penstock.digest import bytes_digest
from penstock.errors import DataError, PenstockError
from penstock.ingest.files.content_digests import DIGESTED_BYTES, content_digests
from penstock.ingest.files.finding import find_files
from penstock.ingest.files.opening import COMPRESSED, STORE_REQUESTS, probe_endpoint
from penstock.ingest.schema import Split
from penstock.ingest.spec import DataSpec, check_split_rules
from penstock.messages import capped, combine_errors, counted
from penstock.storage import filesystem_of
from penstock.stores import is_local, is_s3, store_problem

__all__ = [
    "Cut",
    "Listing",
    "SourceFile",
    "as_columns",
    "extension_of",
    "fingerprints",
    "fingerprints_of",
    "list_location",
    "list_source",
    "listing_problem",
    "refuse_in_two_splits",
    "values_in_folders",
]

_OTHERS_FOLDERS = {
    "_penstock",
    "_unscored",
    "_temporary",
    "_spark_metadata",
    "_delta_log",
    "_impala_insert_staging",
    "__macosx",
    "__pycache__",
    "@eadir",  # of Synology's disks
}

_TABLE_FORMATS = {
    "Delta": ("_delta_log/*", "data.format: delta"),
    "Iceberg": ("metadata/*.metadata.json", "data.format: iceberg, data.train: namespace.table"),
    "Hudi": (".hoodie/*", "export its rows as Parquet to a folder outside the table (spark.read.format('hudi'))"),
    "Spark streaming": (
        "_spark_metadata/*",
        "let Spark write the rows that count to another folder (spark.read.parquet(...).write.parquet(...))",
    ),
    "Lance": ("_versions/*.manifest", "data.format: lance"),
}
"""Tables whose log lists the files that count: the names in the log, and what reads the rows."""

_MAY_BE_LOG = re.compile("|".join(re.escape(names.partition("/")[0]) for names, _ in _TABLE_FORMATS.values()))

_HIVE_ACID = re.compile(r"(?:^|/)(?:base_\d+|(?:delete_)?delta_\d+_\d+(?:_\d+)?)(?:_v\d+)?/bucket_\d+")
"""Files of a transactional table of Hive, whose later ones replace rows of earlier ones."""

_WRITE_OF = re.compile(r"-tid-(\d+)-")
"""The write that made a file, in the names that Databricks gives."""

_OTHER_FORMATS = {
    ".xlsx .xls .xlsb .ods": "set data.format: excel",
    ".parquet .pq .parq": "set data.format: parquet",
    ".csv .tsv .tab": "set data.format: csv",
    ".json .jsonl .ndjson": "set data.format: json",
    ".arrow .arrows .feather .ipc": "set data.format: arrow (huggingface for what save_to_disk has written)",
    ".jpg .jpeg .png .bmp .webp .tif .tiff .gif": "set data.format: images",
    ".txt .text": "set data.format: text",
    ".npy .npz": "set data.format: numpy",
    ".tar": "set data.format: webdataset",
    ".avro": "set data.format: avro",
    ".orc": "set data.format: orc",
    ".wav .flac .ogg": "set data.format: audio",
    ".tfrecord .tfrecords": "set data.format: tfrecord",
    ".db .sqlite .sqlite3": "set data.format: sql",
    ".h5 .hdf5 .mat .pkl .pickle .pt .sav .dta .sas7bdat .rds": "read them in a function: data.format: python",
    ".heic .avif .dcm .svg": "convert them to PNG, or read them in a function: data.format: python",
    ".xz .zip .7z .rar": "unpack them; .gz, .bz2, .zst and .lz4 are read as they are",
}
"""Endings, and what to do with files that have them where another format is named."""

_SPLITS_FILE = "dataset_dict.json"

_MARKER_PATTERNS = (
    *("readme*", "license*", "licence*", "notice*", "changelog*", "sha*sums*", "md5sums*", "*.crc", "*.md5", "*.sha256"),
    *("dataset_info.json", _SPLITS_FILE, "state.json"),  # of Hugging Face's datasets
    *("thumbs.db", "desktop.ini", "*~", "*.tmp", "*.part", "*.swp"),
    "*_$folder$",  # a folder, to Hadoop
)

_MARKERS = re.compile("|".join(map(fnmatch.translate, _MARKER_PATTERNS)))
"""Names of files that are kept beside data, in lower case."""

_DIGEST = re.compile(r"[0-9a-f]{32}(-\d+)?")
"""penstock.digest, and the ETag of an object, which of one uploaded in parts counts them."""

_NULL = "__HIVE_DEFAULT_PARTITION__"


class Cut(NamedTuple):
    """Where a large file can be read from."""

    row: int
    """The first row from here on, from 0."""
    at: int
    """The byte that it begins at; of an Arrow file, the record batch."""
    line: int
    """Its line, from 1, in a file that has lines."""


class SourceFile(Section):
    """One file of the source."""

    uri: str
    """Absolute path or URL, as a user may paste it."""
    name: str
    """Path relative to the location's root, with `/`."""
    strata: dict[str, tuple[float, ...]] | None = None
    """Where rules have `stratify`: for each class of the file, where its splits end (penstock.ingest.read.strata)."""
    location: Split
    """Which of `data.train`, `data.validation`, `data.test` the file was found under."""
    size_bytes: int
    fingerprint: str
    """Changes with the content: its digest, the etag on object stores, the modification time in ns where that is too much."""
    rows: int | None = None
    """None until the file was read."""
    cuts: tuple[Cut, ...] = ()
    """Where it can be read from besides its beginning, which is the first of them; empty of most files."""
    lacks: tuple[str, ...] = ()
    """Columns of the source that this file does not have, and that are null in its rows (`data.missing_columns`)."""
    row_bytes: int | None = None
    """Of a file that is one row, about what the row takes in memory, if that is another size than the file's."""
    state: str = ""
    """Of a file that holds rows of a table or a query: which state of it was read, such as `version-12`."""
    folder_types: tuple[tuple[str, str], ...] = ()
    """Columns in the folders' names with their types as text, where a table declares them."""

    @classmethod
    def unchecked(cls, **fields: Any) -> SourceFile:
        """Make a file of fields that are not checked, in half the memory of a checked one: there may be millions.

        Fields that are set one by one, always in the same order, share one table of their names (PEP 412).
        """
        made, assign = cls.__new__(cls), object.__setattr__
        for name, default in _DEFAULTS:
            assign(made, name, fields.get(name, default))
        assign(made, "__pydantic_fields_set__", _SET)
        assign(made, "__pydantic_extra__", None)
        assign(made, "__pydantic_private__", None)
        return made

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> Iterator[SourceFile]:
        """Make files of the values of their fields, which `as_columns` has listed. Raises ValidationError, KeyError."""
        checked: dict[str, list[Any]] = {
            name: TypeAdapter[Any](cast(Any, GenericAlias(list, cls.model_fields[name].annotation))).validate_python(values)
            for name, values in columns.items()
        }
        return (cls.unchecked(**dict(zip(checked, values, strict=True))) for values in zip(*checked.values(), strict=True))

    def with_facts(self, **facts: Any) -> SourceFile:
        """Return a copy with other values of some fields, which are not checked."""
        return self.unchecked(**{**self.__dict__, **facts})

    @property
    def content(self) -> str | None:
        """What two files share only if they hold the same bytes; None where the fingerprint is a time or a size."""
        return self.fingerprint if _DIGEST.fullmatch(self.fingerprint) else None

    @property
    def folder_columns(self) -> dict[str, str | None]:
        """Column to value, as text, of every `name=value` folder between the location's root and the file, as in Spark."""
        return values_in_folders(self.name)

    def folder_type(self, column: str) -> str:
        """Return the type of a column in the folders' names, as text: string, unless the file's table declares another."""
        return dict(self.folder_types).get(column, "string")


def values_in_folders(name: str) -> dict[str, str | None]:
    """As `SourceFile.folder_columns`, of a path below the root."""
    pairs = (part.partition("=") for part in name.split("/")[:-1])
    return {
        unquote(name): None if value == _NULL else normalize("NFC", unquote(value))
        for name, sign, value in pairs
        if name and sign
    }


_DEFAULTS = [(name, field.default) for name, field in SourceFile.model_fields.items()]

_SET = {*SourceFile.model_fields}
"""One set for all files."""


def as_columns(files: Sequence[SourceFile]) -> dict[str, list[Any]]:
    """List the values of each field that not all files have by default: a record of a million files is a third as large."""
    columns = {name: [getattr(file, name) for file in files] for name, _ in _DEFAULTS}
    return {name: columns[name] for name, default in _DEFAULTS if any(value != default for value in columns[name])}


class Listing(NamedTuple):
    """The files of all locations."""

    files: list[SourceFile]
    """In the order train, validation, test, each by name."""
    left_out: list[str]
    """Paths or URLs of files that a directory has besides, except known clutter."""

    def describe_left_out(self) -> str:
        """Describe the files that are left out; empty if all are read."""
        if not self.left_out:
            return ""
        first = ", ".join(self.left_out[:3]) + (", ..." if len(self.left_out) > 3 else "")
        found = counted(len(self.left_out), "file in the folders of the source is", "files in the folders of the source are")
        return (
            f"{found} not read, because of the name: {first}; what holds rows is to be renamed to an extension of data.format, "
            "or named with a glob"
        )


def list_source(
    data: DataSpec, base_dir: Path, extensions: tuple[str, ...], known: Mapping[Split, list[SourceFile]] | None = None
) -> Listing:
    """List the files of every location. Local ones are read through once.

    Args:
        base_dir: where relative paths start.
        extensions: those of the format (penstock.ingest.formats.format), in lower case and with the dot.
        known: the files of locations where they need not be found.

    Raises:
        SpecError: the split rules contradict each other.
        DataError: locations are missing or hold no file of the format (all of them are listed), or one file is in two.
        ServiceError: the store does not answer or refuses the credentials.
    """
    check_split_rules(data)
    files: list[SourceFile] = []
    left_out: list[str] = []
    problems: list[DataError] = []
    for split in data.locations:
        location = data.place(split)
        if known is not None and split in known:
            files += known[split]
        elif isinstance(location, str):
            try:
                found = list_location(data.format, extensions, base_dir, location, split)
            except DataError as error:
                problems.append(error)
                continue
            files += found.files
            left_out += found.left_out
    if problems:
        raise combine_errors(problems, f"{len(problems)} locations of the section data cannot be read")
    if len({file.location for file in files}) > 1:
        refuse_in_two_splits((os.path.realpath(file.uri) if is_local(file.uri) else file.uri, file) for file in files)
    return Listing(files, left_out)


def extension_of(name: str) -> str:
    """Lower-case extension with its dot, without compression or number (`a.csv.gz`, `a.csv-00000-of-00002` give `.csv`)."""
    stem, extension = posixpath.splitext(posixpath.basename(name).lower())
    if "-of-" in extension:  # as TensorFlow names the files of a set
        extension = extension.partition("-")[0]
    return posixpath.splitext(stem)[1] if extension in COMPRESSED else extension


def list_location(
    format: str, extensions: tuple[str, ...], base_dir: Path, location: str, split: Split = "train", called: str = ""
) -> Listing:
    """List the files of one location.

    Args:
        called: what a person calls the location; by default its key in the pipeline file.

    Raises:
        DataError: it is missing or holds no file of the format.
        ServiceError: as `list_source`.
    """
    called = called or f"data.{split}"
    # Of zip://rows.csv::archive.zip each file's URL needs the archive too; simplecache::s3://bucket names none.
    *chain, last = location.split("::") if "://" in location else [location]
    uri = "::".join([*chain, last if "://" in last else os.path.abspath(base_dir / os.path.expanduser(last))])
    behind = uri.split("::")[1:] if "://" in uri.partition("::")[0] else []
    probe_endpoint(uri)
    try:
        fs, path = filesystem_of(uri)
        root, wanted = find_files(fs, path)
        globbed = glob.has_magic(path)
        fates = ((full, _fate(_name_below(root, full), extensions, globbed=globbed)) for full in wanted if full != path)
        others = {full: fate for full, fate in fates if fate != "data"}
        whole = root == path.rstrip("/")  # a folder, whose files are all found; of others, logs may be beside the files found
        folders = _folders_above([path] if whole else (full for full in wanted if full not in others))
        _refuse_tables(called, uri, fs, (full for full in wanted if full != path), folders)
        _refuse_dataset_dicts(called, fs, [] if whole else [root], wanted)
        for full in others:
            del wanted[full]
        _refuse_uncommitted(called, fs, wanted)
        _refuse_dangling(wanted)
        prints = fingerprints(fs, wanted, by_content=is_local(uri))
        files = [
            SourceFile.unchecked(
                uri=full if is_local(uri) else "::".join([fs.unstrip_protocol(full), *behind]),
                name=_name_below(root, full),
                location=split,
                size_bytes=int(wanted.pop(full)["size"] or 0),  # of millions, a store's facts are dropped one by one
                fingerprint=fingerprint,
            )
            for full, fingerprint in zip([*wanted], prints, strict=True)
        ]
    except PenstockError:
        raise
    except Exception as error:  # every store has errors of its own
        raise listing_problem(called, uri, error) from error
    if not files:
        skipped = [f"skipped: {posixpath.relpath(full, root)}" for full in sorted(others)]
        raise DataError(
            f"{called}: no {format} file in {uri}, which takes {' '.join(extensions)}",
            problems=capped(skipped, 5),
            next_step=_describe_formats(others)
            or f"correct {called} or the format; a glob such as {uri.rstrip('/')}/* takes files of any extension",
        )
    files.sort(key=lambda file: file.name)
    return Listing(files, sorted(full for full, fate in others.items() if fate == "left out"))


def _name_below(root: str, full: str) -> str:
    return full[len(root) + 1 :] if full.startswith(f"{root}/") else posixpath.relpath(full, root)


def _describe_formats(found: Iterable[str]) -> str:
    """Describe which format reads such files, or how they are converted to one; empty if they are unknown."""
    extensions = {extension_of(full) for full in found} | {posixpath.splitext(full.lower())[1] for full in found}
    for named, advice in _OTHER_FORMATS.items():
        if extensions & {*named.split()}:
            return f"for {' '.join(sorted(extensions & {*named.split()}))} {advice}"
    return ""


def _refuse_tables(called: str, uri: str, fs: AbstractFileSystem, below: Iterable[str], folders: set[str]) -> None:
    """Refuse a folder of a table, which holds files with deleted rows beside those that count.

    Args:
        below: paths of files that were found, a log perhaps among them.
        folders: other places of a log.
    """
    logs = [(format, name) for name in below if _MAY_BE_LOG.search(name) for format in _TABLE_FORMATS if _is_log(format, name)]
    with ThreadPoolExecutor(STORE_REQUESTS) as pool:
        asked = [(format, folder) for folder in sorted(folders) for format in _TABLE_FORMATS]
        logs += [
            (format, log)
            for (format, _), log in zip(asked, pool.map(lambda each: _log_in(fs, *each), asked), strict=True)
            if log
        ]
    for format, log in logs:
        raise DataError(
            f"{called}: {uri} is a {format} table, or a part of one ({log}): its log lists the files that count, "
            "and read by their names they would give rows that do not",
            next_step=_TABLE_FORMATS[format][1],
        )


def _refuse_uncommitted(called: str, fs: AbstractFileSystem, paths: Iterable[str]) -> None:
    """Refuse files that their writers' own records do not count: of Hive's transactions, and of failed writes of Databricks."""
    by_write: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        if "bucket_" in path and _HIVE_ACID.search(path):
            raise DataError(
                f"{called}: {path} belongs to a transactional table of Hive: other files replace or delete some of its rows",
                next_step="let Hive write the rows that count (INSERT OVERWRITE DIRECTORY ... STORED AS ORC SELECT ...)",
            )
        if "-tid-" in path and (made := _WRITE_OF.search(posixpath.basename(path))):
            by_write.setdefault((posixpath.dirname(path), made[1]), []).append(path)
    for (folder, write), files in by_write.items():
        started, committed = (f"{folder}/_{state}_{write}" for state in ("started", "committed"))
        if fs.exists(started) and not fs.exists(committed):
            raise DataError(
                f"{called}: {files[0]} is of a write that has not been committed: there is {started}, and no {committed}",
                next_step=f"wait until it is done; if it failed, delete the files of write {write}, or call VACUUM",
            )


def _refuse_dataset_dicts(called: str, fs: AbstractFileSystem, folders: Sequence[str], found: Iterable[str]) -> None:
    """Refuse a folder of several splits of Hugging Face's datasets, which would be read as one."""
    named = [f"{folder}/{_SPLITS_FILE}" for folder in folders]
    listed = [full for full in found if posixpath.basename(full) == _SPLITS_FILE] or list(filter(fs.exists, named))
    for full in listed:
        folder, splits = posixpath.dirname(full), json.loads(fs.cat_file(full)).get("splits", [])
        raise DataError(
            f"{called}: {folder} holds a DatasetDict, whose splits are folders: {', '.join(splits)}",
            next_step=f"name one split: {called}: {folder}/{splits[0] if splits else 'train'}",
        )


def _is_log(format: str, path: str) -> bool:
    names = _TABLE_FORMATS[format][0]
    return names.partition("/")[0] in path and fnmatch.fnmatchcase(f"/{path}", f"*/{names}")


def _log_in(fs: AbstractFileSystem, format: str, folder: str) -> str:
    """Return the path of a log of such a table in the folder; empty if it has none, or the store lists no such folder."""
    with contextlib.suppress(OSError, ValueError, NotImplementedError):
        names = fs.ls(f"{folder}/{posixpath.dirname(_TABLE_FORMATS[format][0])}", detail=False)
        return next((name for name in names if _is_log(format, name)), "")
    return ""


def _folders_above(paths: Iterable[str]) -> set[str]:
    """Return all folders that the paths lie in, up to the top."""
    folders: set[str] = set()
    for path in paths:
        folder = posixpath.dirname(path)
        while folder.strip("/") and folder not in folders:
            folders.add(folder)
            folder = posixpath.dirname(folder)
    return folders


def _refuse_dangling(found: Mapping[str, Mapping[str, Any]]) -> None:
    dangling = [f"{full} leads to {info['leads_nowhere']}" for full, info in sorted(found.items()) if "leads_nowhere" in info]
    if dangling:
        raise DataError(
            counted(len(dangling), "source file is a link to nothing", "source files are links to nothing"),
            problems=capped(dangling),
            next_step="fetch the files behind them (git annex get, dvc pull), or remove the links",
        )


def _fate(name: str, extensions: tuple[str, ...], *, globbed: bool) -> Literal["data", "clutter", "left out"]:
    """Decide about a file that is not named by itself, by its path below the root."""
    *folders, last = name.lower().split("/")
    is_format = extension_of(last) in extensions
    known = _MARKERS.match(last) is not None
    # A leading underscore marks Spark's and Dask's own files (_SUCCESS, _metadata), which have no extension of a format;
    # a camera's _DSC0001.JPG has one.
    known = known or last.startswith((".", "_"))
    if known and not is_format:
        return "clutter"
    if not _OTHERS_FOLDERS.isdisjoint(folders) or last.startswith(".") or any(folder.startswith(".") for folder in folders):
        return "clutter"
    return "data" if globbed or is_format or not extension_of(last) else "left out"


def fingerprints(fs: AbstractFileSystem, found: Mapping[str, dict[str, Any]], *, by_content: bool) -> list[str]:
    """Return the fingerprint of each file: on a local disk the digest of its content, unless that would take too long."""
    if by_content and sum(info["size"] for info in found.values()) <= DIGESTED_BYTES:
        with contextlib.suppress(OSError):  # the reader names every file that it cannot open
            return content_digests([*found], [info.get("stat") for info in found.values()])
    return [
        str((info.get("stat") or os.stat(path)).st_mtime_ns) if by_content else fingerprints_of(fs, path, info)[0]
        for path, info in found.items()
    ]


def fingerprints_of(fs: AbstractFileSystem, path: str, info: dict[str, Any]) -> list[str]:
    """Return facts of a store about a file that change with its content, the best first; in memory its content's digest."""
    if fs.protocol == "memory":  # its time is that of this process, which has put it there
        return [bytes_digest(fs.cat_file(path))]
    keys = (
        "ETag",
        "etag",
        "md5Hash",
        "blob_id",
        "content_md5",
        "LastModified",
        "last_modified",
        "updated",
        "mtime",
        "created",
        "CRC",
    )
    return [*(str(info[key]).strip('"') for key in keys if info.get(key)), f"size {info['size']}"]


def refuse_in_two_splits(files: Iterable[tuple[object, SourceFile]]) -> None:
    """Raise DataError for files, each after what only the same rows have in common, that are in two splits."""
    seen: dict[object, SourceFile] = {}
    shared = []
    for key, file in files:
        first = seen.setdefault(key, file)
        if first.location != file.location:
            shared.append(f"{file.uri} in data.{file.location} is {first.uri} in data.{first.location}")
    if shared:
        found = counted(len(shared), "source file is", "source files are")
        raise DataError(
            f"{found} in two splits, by path or content: the model would be judged on rows it has seen",
            problems=capped(shared),
            next_step="leave them out of one split (a folder or a glob of its own), or hold rows out by a rule "
            "(data.test: {fraction: 0.1})",
        )


def listing_problem(called: str, uri: str, error: Exception) -> PenstockError:
    """Turn what a store raised while its files were listed into an error that names the location."""
    where = f"{called}: {uri}"
    if isinstance(error, FileNotFoundError):
        if not is_local(uri):
            setting = f"{called}, or AWS_ENDPOINT_URL if another store has it" if is_s3(uri) else called
            return DataError(
                f"{where} matches no file, or its bucket or server is not there",
                next_step=f"start the server, or correct {setting}",
            )
        advice = f"correct {called}" + ("; relative paths start at the pipeline file" if called.startswith("data.") else "")
        return DataError(f"{where} matches no file", next_step=advice)
    if is_local(uri):
        return DataError(f"{where} cannot be listed: {error}", next_step="check the path and its permissions")
    return store_problem(uri, error)
