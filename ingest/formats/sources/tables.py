"""Where is a table that a user names, in which parts is it read, and which error does a failure of its library become?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import DataError, PenstockError
from penstock.redact import first_line
from penstock.stores import DENIED, endpoint_of, is_local, is_s3, settings_of, store_problem

__all__ = ["address_of", "naming", "object_store_options"]


def address_of(target: str, base_dir: Path) -> str:
    """Return a URL as it is, a path from the pipeline file's folder."""
    return target if "://" in target else os.path.abspath(base_dir / os.path.expanduser(target))


@contextmanager
def naming(what: str, target: str) -> Iterator[None]:
    """Turn whatever a library raises in the block into an error that names the table.

    Raises:
        DataError: the table is not there or cannot be read.
        ServiceError: its store refuses the credentials.
    """
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # every library has a tree of its own
        if not is_local(target) and any(word in str(error) for word in DENIED):
            raise store_problem(target, error) from error
        raise DataError(
            f"{target}: cannot be read as a {what}: {type(error).__name__}: {first_line(error)}",
            next_step="correct it, or its format and the options of that: in data, or --format and --option of predict",
        ) from error


def object_store_options(uri: str) -> dict[str, str]:
    """Return the settings of an S3 location for libraries on Rust's `object_store`; it reads the rest from the environment.

    Raises:
        PreflightError: as `StoreSpec.credentials`.
    """
    endpoint, settings = endpoint_of(uri), settings_of(uri)
    options = {"aws_endpoint": endpoint, "allow_http": "true"} if endpoint else {}
    if settings is None or not is_s3(uri):
        return options
    if settings.region is not None:
        options["aws_region"] = settings.region
    if settings.anonymous:
        options["aws_skip_signature"] = "true"
    if (credentials := settings.credentials()) is not None:
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        options |= {name: value for name, value in zip(names, credentials, strict=True) if value}
    return options
