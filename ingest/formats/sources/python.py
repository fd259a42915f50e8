"""How are the rows of a function of the user's a source?"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from penstock.config import Section
from penstock.errors import DataError, PenstockError
from penstock.ingest.formats.sources.kept import KeptFormat, Origin
from penstock.ingest.spec import DataSpec
from penstock.messages import describe_error
from penstock.usercode.capture import UserCode, capture

__all__ = ["PythonFormat", "PythonOptions"]


class PythonOptions(Section):
    """How the function of `data.train` is called, and when again.

    `train: source.py:rows` names a function that returns or yields pandas DataFrames, Arrow tables or record batches, dicts of
    column to array [rows, ...], or structured numpy arrays; or that returns a `ray.data.Dataset`, and with it whatever Ray Data
    reads. Its rows are written to the storage once, and again when the code it reaches, its params or the fingerprint change.
    """

    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the call. Text that names a file or folder beside the pipeline file is given with its whole path."""
    fingerprint: str = ""
    """What the rows depend on besides the code, such as a date or a table's version: another text, other rows. Of the form
    `source.py:version` it is a function, which is called with the params each time and returns the text."""


class PythonFormat(KeptFormat):
    """Rows that a function gives: `train: source.py:rows`. `penstock.run(file, data={"train": frame})` needs no function."""

    pins = ("fingerprint",)
    Options = PythonOptions

    def origin(self, data: DataSpec, target: str, base_dir: Path, code_files: Sequence[str]) -> Origin:
        """Return the function, known by its code, its params and the fingerprint."""
        options: PythonOptions = data.__dict__.get("python") or PythonOptions()
        code = capture(target, base_dir, options.params, files=code_files)
        identity = [code.digest, options.model_dump(mode="json")["params"], _fingerprint(options, base_dir, code_files)]
        return Origin(identity, lambda: _call(code, options, base_dir), reading=lambda: _reading(code))


def _fingerprint(options: PythonOptions, base_dir: Path, code_files: Sequence[str]) -> str:
    if ":" not in options.fingerprint:
        return options.fingerprint
    code = capture(options.fingerprint, base_dir, options.params, files=code_files)
    with _naming(code):
        return str(_call(code, options, base_dir))


def _call(code: UserCode, options: PythonOptions, base_dir: Path) -> Any:
    return code.function()(**{name: _whole(value, code, base_dir) for name, value in options.params.items()})


def _whole(value: Any, code: UserCode, base_dir: Path) -> Any:
    """Resolve a path beside the pipeline file, wherever the command was started; the code finds captured files itself."""
    is_path = isinstance(value, str) and value and value not in code.param_files and (base_dir / value).exists()
    return str(base_dir / value) if is_path else value


@contextmanager
def _naming(code: UserCode) -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # the user's code: any error is reported with its place
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{code.target} raised {describe_error(error)} ({frame.filename}, line {frame.lineno})",
            next_step=f"correct {code.target}",
        ) from error


@contextmanager
def _reading(code: UserCode) -> Iterator[None]:
    with _naming(code), _ray_ends_again():
        yield


@contextmanager
def _ray_ends_again() -> Iterator[None]:
    """Shut down a Ray that the function has started, as most of Ray Data does: the run starts its own."""
    before = _ray_runs()
    try:
        yield
    finally:
        if not before and _ray_runs():
            sys.modules["ray"].shutdown()


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
