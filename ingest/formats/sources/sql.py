"""How are the rows of a query read? Once, through SQLAlchemy; they are kept, since no database promises the same ones again."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy
from pydantic import Field

from penstock.config import Section
from penstock.errors import DataError, PreflightError
from penstock.ingest.formats.sources.kept import KeptFormat, Origin
from penstock.ingest.formats.sources.tables import naming
from penstock.ingest.spec import DataSpec
from penstock.messages import shorten

__all__ = ["SqlFormat", "SqlOptions"]

_BATCH_ROWS = 65536


class SqlOptions(Section):
    """Which database is asked. `data.train` is a query, or a file that ends with .sql and holds one.

    The rows are read once and kept, until the query, the database's address or `snapshot` change, or the file of an SQLite
    database. `ORDER BY` gives them in the same order wherever they are read anew.
    """

    connection: str
    """SQLAlchemy's URL of the database without its password, such as `sqlite:///rows.db`, from the pipeline file's folder; or
    `$NAME`, the variable that holds the URL with all that is secret."""
    snapshot: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]*$")] = ""
    """Another text, such as a date, reads the rows again; it is part of the key and of the files' names."""


class SqlFormat(KeptFormat):
    """What a database answers to a query, through SQLAlchemy; the rows are copied to the storage once."""

    pins = ("snapshot",)
    folder_columns = False
    Options = SqlOptions

    def origin(self, data: DataSpec, target: str, base_dir: Path, code_files: Sequence[str]) -> Origin:
        """Return the query, known by its text, the database's address and the snapshot."""
        options: SqlOptions = data.__dict__["sql"]
        query = _query(target, base_dir)
        with naming("query", shorten(query)):
            url = _url(options, base_dir)
        database = [url.render_as_string(hide_password=True)]
        if url.get_backend_name() == "sqlite" and url.database:
            if not os.path.exists(url.database):
                raise DataError(f"data.sql: there is no database {url.database}", next_step="correct data.sql.connection")
            for path in (url.database, f"{url.database}-wal"):  # which holds what was committed last, in WAL mode
                stat = os.stat(path) if os.path.exists(path) else None
                database += [str(stat.st_size), str(stat.st_mtime_ns)] if stat is not None and stat.st_size else []
        version = f"snapshot-{options.snapshot}" if options.snapshot else ""
        identity = ["sql", query, database, options.snapshot]
        return Origin(identity, lambda: _rows(url, query), version, reading=lambda: naming("query", shorten(query)))


def _query(target: str, base_dir: Path) -> str:
    if not re.fullmatch(r"\S+\.sql", target):
        return target
    file = base_dir / target
    if not file.is_file():
        raise DataError(f"there is no query {file}", next_step="correct data.train; relative paths start at the pipeline file")
    return file.read_text(encoding="utf-8")


def _url(options: SqlOptions, base_dir: Path) -> sqlalchemy.URL:
    text = options.connection
    if text.startswith("$"):
        text = os.environ.get(text[1:], "")
    if not text:
        raise PreflightError(
            f"data.sql.connection: {options.connection[1:]} is not set", next_step="set it to the database's URL"
        )
    url = sqlalchemy.make_url(text)
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        url = url.set(database=os.path.abspath(base_dir / url.database))
    return url


def _rows(url: sqlalchemy.URL, query: str) -> Iterator[dict[str, list[Any]]]:
    engine = sqlalchemy.create_engine(url)
    try:
        with engine.connect() as connection:
            answer = connection.execution_options(stream_results=True).execute(sqlalchemy.text(query))
            names = list(answer.keys())
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"the query gives column {twice[0]!r} twice", next_step="name its columns (SELECT ... AS ...)")
            for some in answer.partitions(_BATCH_ROWS):
                columns = zip(names, zip(*some, strict=True), strict=True)
                yield {name: [_plain(value) for value in column] for name, column in columns}
    finally:
        engine.dispose()


def _plain(value: Any) -> Any:
    if isinstance(value, memoryview):
        return bytes(value)
    return str(value) if isinstance(value, uuid.UUID) else value
