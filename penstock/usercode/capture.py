"""How does user code travel: from a file beside the pipeline file to a Ray worker, with a key that covers what it reaches?

`capture` reads and never runs; `UserCode.load` runs, in any process, and imports the captured files as a private package.
"""

from __future__ import annotations

import base64
import functools
import importlib
import importlib.util
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import Field

from penstock.config import Section
from penstock.digest import digest_of
from penstock.installed import versions_of
from penstock.messages import describe_error, did_you_mean
from penstock.usercode.closure import Closure
from penstock.usercode.files import content_digest, named_file, params_texts, shipped_data
from penstock.usercode.imports import Layout, dotted_name
from penstock.usercode.package import BINARY, Package, file_content
from penstock.usercode.source import UserCodeError, read_source_text

__all__ = ["NO_CODE", "UserCode", "UserCodeError", "capture"]


class UserCode(Section):
    """One object of user code with everything needed to import it elsewhere. Plain data: it pickles and prints as JSON."""

    target: str
    """`model.py:Classifier`, or `package.module:Name` for installed code."""
    digest: str
    """Of what the target reaches: definitions, data files, versions. What is shipped besides does not count."""
    files: dict[str, str]
    """Project-relative path to content: Python source as text, data files as `base64:...`. Empty for installed code."""
    versions: dict[str, str]
    """Version of every installed distribution the reached code imports (or a digest of its sources, where it has none)."""
    origin: str = ""
    """The project folder it was captured from, for tracebacks."""
    reached: dict[str, str] = Field(default_factory=dict)
    """`model.py:Net`, or the path of another file -> digest, so that a change can be reported by that name."""
    param_files: dict[str, str] = Field(default_factory=dict)
    """Path in params as it is written -> the captured file, or where that does not travel, its absolute path."""
    variables: tuple[str, ...] = ()
    """Where reached code reads environment variables, which no key covers, as `file:line`."""

    def located(self, params: Any) -> Any:
        """Return the params with the path of each captured file replaced by its path in this process."""
        if isinstance(params, dict):
            return {name: self.located(value) for name, value in params.items()}
        if isinstance(params, (list, tuple)):
            return [self.located(value) for value in params]
        path = self.param_files.get(params) if isinstance(params, str) else None
        if path is None:
            return params
        return str(Package.of(self.files, self.origin).folder / path) if path in self.files else path

    def function(self) -> Any:
        """Return the loaded object, to be called with params as in the pipeline file: `located` is applied to them."""
        loaded = self.load()
        if not self.param_files:
            return loaded
        made = functools.update_wrapper(lambda *given, **params: loaded(*given, **self.located(params)), loaded, updated=())
        vars(made)["digest"] = self.digest  # an installed class is the same object, whatever the files hold
        return made

    @property
    def shipped(self) -> dict[str, int]:
        """Path and size in bytes of every file that travels."""
        return {path: len(file_content(path, content)) for path, content in self.files.items()}

    def load(self) -> Any:
        """Import the code and return the object; loading equal files twice in one process gives the same object.

        Runs in any process. It never depends on the working directory or on `sys.path` for the user's own files.

        Raises:
            UserCodeError: the import raises (the message names file, line and cause), or the name is missing afterwards.
        """
        module_name, name = self.target.rsplit(":", 1)
        package = Package.of(self.files, self.origin) if self.files else None
        if package is not None:
            module_name = f"{package.root}.{dotted_name(module_name)}".rstrip(".")
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            place = _place(error, self, package) if package is not None else ""
            raise UserCodeError(
                f"{self.target} cannot be imported: {place}{describe_error(error)}", next_step=_remedy(error)
            ) from error
        try:
            return getattr(module, name)
        except AttributeError as error:
            hint = did_you_mean(name, dir(module), most=3, cutoff=0.5)
            raise UserCodeError(f"{self.target}: the module has no {name!r} after import{hint}") from error


NO_CODE = UserCode(target="", digest=digest_of([]), files={}, versions={})
"""Of a pipeline file that names none: the framework needs nothing but parameters."""


def capture(
    target: str,
    base_dir: Path,
    params: Any = None,
    is_source: Callable[[Path], bool] = lambda _file: False,
    files: Iterable[str] = (),
) -> UserCode:
    """Read the code that `target` names, and all project files it needs, without running any of it.

    Args:
        target: `path/to/file.py:Name` relative to `base_dir`, or `package.module:Name` (a project file, else installed).
        base_dir: the folder of the pipeline file.
        params: arguments of the target; files that they name count and travel like those that code names. With an installed
            target they count only, by absolute paths of this machine.
        is_source: whether a file (resolved) is of the data the pipeline reads; those do not travel, though code may name them.
        files: further files that count and travel, relative to `base_dir`: those of `code.files`.

    Raises:
        UserCodeError: no such file or name, a syntax error in a file it needs, or a file of secrets is named.
    """
    module, separator, name = target.rpartition(":")
    if not separator or not module or not name.isidentifier():
        raise UserCodeError(f"{target!r} names no code", next_step="write `path/to/file.py:Name` or `package.module:Name`")
    path = _project_path(module, target, base_dir)
    closure = None if path is None else Closure(base_dir, path, name)
    top = module.split(".")[0]
    if closure is None and not (top.isidentifier() and importlib.util.find_spec(top)):  # finding more of it would run it
        raise UserCodeError(
            f"{target}: {module!r} is neither a file of the project nor an installed module",
            next_step="write `path/to/file.py:Name`, or install the package",
        )
    in_params = {text: found for text in params_texts(params) if (found := named_file(base_dir, text, target))}
    named = [named_file(base_dir, text, where) for where, text in (closure.texts if closure else ())]
    named += [named_file(base_dir, file, "code.files") for file in files]
    data = sorted({*in_params.values(), *filter(None, named)})
    shipped = {source: read_source_text(base_dir / source) for source in (closure.sources if closure else ())}
    for file in data if closure else ():
        content = None if file in shipped or is_source((base_dir / file).resolve()) else shipped_data(base_dir, file, target)
        if content is not None:
            shipped[file] = content.decode() if file.endswith(".py") else BINARY + base64.b64encode(content).decode()
    reached = {**(closure.digests() if closure else {}), **{file: content_digest(base_dir / file) for file in data}}
    versions = versions_of(closure.packages if closure else {top})
    root = base_dir.resolve()
    return UserCode(
        target=f"{path or module}:{name}",
        digest=digest_of({"target": [path or module, name], "reached": reached, "versions": versions}),
        files=shipped,
        versions=versions,
        origin=str(root) if closure else "",
        reached=reached,
        param_files={text: file if file in shipped else str(root / file) for text, file in in_params.items()},
        variables=tuple(closure.variables) if closure else (),
    )


def _project_path(module: str, target: str, base_dir: Path) -> str | None:
    """Return the file of the project that `module` means, None if it means an installed one."""
    if not module.endswith(".py") and "/" not in module:
        found = Layout(base_dir).find(module.split("."))
        return None if found is None or found.endswith("/") else found
    path = os.path.normpath(module).replace(os.sep, "/")
    if path.startswith(("/", "..")):
        raise UserCodeError(
            f"{target}: the file must lie below {base_dir}", next_step="move it there, or move the pipeline file up"
        )
    if not (base_dir / path).is_file():
        patterns = ("*.py", "*/*.py", f"{Path(path).parent}/*.py")
        files = {file.relative_to(base_dir).as_posix() for pattern in patterns for file in base_dir.glob(pattern)}
        raise UserCodeError(
            f"{target}: there is no file {path} in {base_dir}{did_you_mean(path, files, most=3, cutoff=0.5)}",
            next_step="correct the path in the pipeline file",
        )
    return path


def _place(error: BaseException, code: UserCode, package: Package) -> str:
    """Return `file:line: ` of the innermost frame in the user's files."""
    shown = {package.shown_path(path): path for path in code.files if path.endswith(".py")}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in shown]
    return f"{shown[frames[-1].filename]}:{frames[-1].lineno}: " if frames else ""


def _remedy(error: BaseException) -> str:
    """Return the next step after an import that raised `error`."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install the package that has it where the code runs (pip install {error.name}?), or correct the import"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, KeyError) and frames and frames[-1].filename in (os.__file__, "<frozen os>"):
        return f"set the environment variable {error.args[0]} where the code runs, also on the nodes of a cluster"
    return 'correct the file; code that should not run on import belongs under `if __name__ == "__main__":`'
