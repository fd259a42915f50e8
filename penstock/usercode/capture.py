"""How does user code travel: from a file beside the pipeline file to a Ray worker, with a key that knows what it reaches?

`capture` reads and never runs; `UserCode.load` runs, in any process, and imports the captured files as a private package.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from penstock.config import Section
from penstock.digest import digest_of, file_digest
from penstock.messages import said_of
from penstock.usercode.closure import SHIPPED_DATA_BYTES, Closure, is_file, secret_refused
from penstock.usercode.imports import Layout, dotted_name
from penstock.usercode.module import UserCodeError
from penstock.usercode.package import BINARY, Package, file_content
from penstock.usercode.secret_files import holds_private_key
from penstock.usercode.syntax import read_source_text

__all__ = ["NO_CODE", "UserCode", "UserCodeError", "capture"]


class UserCode(Section):
    """One object of user code with everything needed to import it elsewhere. Plain data: it pickles and prints as JSON."""

    target: str
    """`model.py:Classifier`, or `package.module:Name` for installed code."""
    digest: str
    """Of what the target reaches: definitions, data files, versions. What is shipped besides does not count."""
    files: dict[str, str]
    """Project-relative path to content: Python source as text, reached data files as `base64:...`. Empty for installed code."""
    versions: dict[str, str]
    """Version of every installed distribution the reached code imports (or a digest of its sources, where it has none)."""
    origin: str = ""
    """The project folder it was captured from, for tracebacks."""
    reached: dict[str, str] = Field(default_factory=dict)
    """File -> digest of what the target reaches in it, so that a change can be reported by the file's name."""
    names: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Python file of the project -> the definitions that the target reaches in it: see penstock.usercode.definitions."""
    param_files: dict[str, str] = Field(default_factory=dict)
    """Path in params as it is written -> the captured file, or where that does not travel, its absolute path."""
    limits: tuple[str, ...] = ()
    """What the target reads that no key knows, as `file:line: what`."""

    def located(self, params: Any) -> Any:
        """The same params with every path of a file that was captured for them leading to it in this process."""
        if isinstance(params, dict):
            return {name: self.located(value) for name, value in params.items()}
        if isinstance(params, (list, tuple)):
            return [self.located(value) for value in params]
        path = self.param_files.get(params) if isinstance(params, str) else None
        if path is None:
            return params
        return str(Package.of(self.files, self.origin).folder / path) if path in self.files else path

    def function(self) -> Any:
        """The loaded object, to be called with params as the pipeline file has them: `located` is applied to them."""
        loaded = self.load()
        return (lambda *given, **params: loaded(*given, **self.located(params))) if self.param_files else loaded

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
        if self.files:
            package = Package.of(self.files, self.origin)
            module_name = f"{package.root}.{dotted_name(module_name)}".rstrip(".")
        else:
            package = None
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            where = _place(error, self, package)
            raise UserCodeError(
                f"{self.target} cannot be imported: {where}{said_of(error)}",
                next_step=_mended(error),
            ) from error
        try:
            return getattr(module, name)
        except AttributeError as error:
            close = difflib.get_close_matches(name, dir(module), n=3, cutoff=0.5)
            hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
            raise UserCodeError(f"{self.target}: the module has no {name!r} after import{hint}") from error


def _mended(error: BaseException) -> str:
    """What a user does about an import that raised `error`."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install the package that has it where the code runs (pip install {error.name}?), or correct the import"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, KeyError) and frames and frames[-1].filename in (os.__file__, "<frozen os>"):
        return f"set the environment variable {error.args[0]} where the code runs, also on the nodes of a cluster"
    return 'correct the file; code that should not run on import belongs under `if __name__ == "__main__":`'


NO_CODE = UserCode(target="", digest=digest_of([]), files={}, versions={})
"""Of a pipeline file that names none: what trains needs nothing but parameters."""


def capture(
    target: str, base_dir: Path, params: Any = None, is_source: Callable[[Path], bool] = lambda _file: False
) -> UserCode:
    """Read the code that `target` names, and all project files it needs, without running any of it.

    Args:
        params: what the target is called with; files of the project that they name count and travel like those in code.
        target: `path/to/file.py:Name` relative to `base_dir`, or `package.module:Name` (a project file, else installed).
        base_dir: the folder of the pipeline file.
        is_source: whether a file (resolved) is of the data the pipeline reads; those do not travel, though code may name them.

    Raises:
        UserCodeError: no such file or name, a syntax error in a file it needs, or a file of secrets is named.
    """
    module, separator, name = target.rpartition(":")
    if not separator or not module or not name.isidentifier():
        raise UserCodeError(f"{target!r} names no code", next_step="write `path/to/file.py:Name` or `package.module:Name`")
    path = _project_path(module, target, base_dir)
    if path is None:
        return _capture_installed(target, module, name, {text: base_dir / text for text in _paths_in(params)})
    closure = Closure(base_dir, path, name)
    named = {text: found for text in _paths_in(params) if (found := closure.name_file(text)) is not None}
    versions = _versions(closure.packages)
    files = {source: read_source_text(base_dir / source) for source in closure.sources()}
    for data in closure.data:
        file = base_dir / data
        if data in files or data.startswith("/") or file.stat().st_size > SHIPPED_DATA_BYTES or is_source(file.resolve()):
            continue
        content = file.read_bytes()
        if holds_private_key(content):
            raise secret_refused(target, data)
        files[data] = read_source_text(file) if data.endswith(".py") else BINARY + base64.b64encode(content).decode()
    reached = closure.digests()
    return UserCode(
        target=f"{path}:{name}",
        digest=digest_of({"path": path, "name": name, "reached": reached, "versions": versions}),
        files=files,
        versions=versions,
        origin=str(base_dir.resolve()),
        reached=reached,
        names=closure.names(),
        param_files={text: path if path in files else str(base_dir.resolve() / path) for text, path in named.items()},
        limits=tuple(closure.limits),
    )


def _paths_in(params: Any) -> Iterator[str]:
    """The strings in params that look like a path: with a folder or an extension."""
    if isinstance(params, str):
        if "/" in params or "." in params:
            yield params
    elif isinstance(params, (dict, list, tuple)):
        for value in params.values() if isinstance(params, dict) else params:
            yield from _paths_in(value)


def _project_path(module: str, target: str, base_dir: Path) -> str | None:
    if module.endswith(".py") or "/" in module:
        path = os.path.normpath(module).replace(os.sep, "/")
        if path.startswith(("/", "..")):
            raise UserCodeError(
                f"{target}: the file must lie below {base_dir}", next_step="move it there, or move the pipeline file up"
            )
        if not (base_dir / path).is_file():
            folder = (base_dir / path).parent
            found = {p.relative_to(base_dir).as_posix() for pattern in ("*.py", "*/*.py") for p in base_dir.glob(pattern)}
            found |= {p.relative_to(base_dir).as_posix() for p in folder.glob("*.py")}
            close = difflib.get_close_matches(path, sorted(found), n=3, cutoff=0.5)
            hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
            raise UserCodeError(
                f"{target}: there is no file {path} in {base_dir}{hint}", next_step="correct the path in the pipeline file"
            )
        return path
    found_path = Layout.on_disk(base_dir).find(module.split("."))
    return None if found_path is None or found_path.endswith("/") else found_path


def _capture_installed(target: str, module: str, name: str, named: dict[str, Path]) -> UserCode:
    """Describe installed code. Only the top package is looked up, because finding a submodule would run its parents.

    Args:
        named: what params say -> where that would be a file. Such files count, and stay where they are.
    """
    top, *rest = module.split(".")
    spec = None if not top.isidentifier() else importlib.util.find_spec(top)
    if spec is None:
        raise UserCodeError(
            f"{target}: {module!r} is neither a file of the project nor an installed module",
            next_step="write `path/to/file.py:Name`, or install the package",
        )
    roots = list(spec.submodule_search_locations or [])
    located = next((path for root in roots if (path := Layout.on_disk(Path(root)).find(rest))), None)
    if rest and located is None and not any(next(Path(root).glob("/".join(rest) + ".*"), None) for root in roots):
        raise UserCodeError(f"{target}: the installed package {top!r} has no module {module!r}")
    if located is not None and not located.endswith("/"):
        root = next(Path(root) for root in roots if (Path(root) / located).is_file())
        _check_name(root / located, name, target)
    versions = _versions({top})
    param_files = {text: str(file.resolve()) for text, file in named.items() if is_file(file)}
    reached = {text: file_digest(Path(file)) for text, file in param_files.items()}
    digest = digest_of({"target": target, "versions": versions} | ({"reached": reached} if reached else {}))
    return UserCode(target=target, digest=digest, files={}, versions=versions, reached=reached, param_files=param_files)


def _check_name(file: Path, name: str, target: str) -> None:
    try:
        tree = ast.parse(read_source_text(file))
    except SyntaxError as error:
        raise UserCodeError(f"{target}: {file} is no valid Python: {error.msg}, line {error.lineno}") from error
    words = {getattr(n, "name", None) or getattr(n, "id", None) or getattr(n, "asname", None) for n in ast.walk(tree)}
    if name not in words and not words & {"*", "__getattr__"}:
        close = difflib.get_close_matches(name, sorted(filter(None, words)), n=3, cutoff=0.5)
        raise UserCodeError(f"{target}: {file} has no {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))


@functools.cache
def _distributions() -> dict[str, list[importlib.metadata.Distribution]]:
    """Top-level module -> the distributions that say they bring it.

    `importlib.metadata.packages_distributions` looks at every installed file, which takes a second where torch is installed.
    """
    found: dict[str, list[importlib.metadata.Distribution]] = {}
    for distribution in importlib.metadata.distributions():
        for top in _top_level(distribution):
            found.setdefault(top, []).append(distribution)
    return found


def _top_level(distribution: importlib.metadata.Distribution) -> set[str]:
    declared = (distribution.read_text("top_level.txt") or "").split()
    if declared:
        return set(declared)
    record = distribution.read_text("RECORD")
    files = map(str, distribution.files or []) if record is None else (line.split(",")[0] for line in record.splitlines())
    return {file.split("/")[0] if "/" in file else inspect.getmodulename(file) or "" for file in files}


def _versions(packages: set[str]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for top in sorted(packages - sys.stdlib_module_names - set(sys.builtin_module_names)):
        for name in sorted({distribution.metadata["Name"] for distribution in _distributions().get(top, [])} - {None}):
            # Looked up by name: an upgrade that was cut off leaves a folder `~umpy-...`, which tells of another version.
            versions[name] = importlib.metadata.version(name)
            if _is_editable(importlib.metadata.distribution(name)) and (source := _source_digest(top)):
                # As a local version, which a requirement leaves out: `pip install -e` keeps the number at every edit.
                versions[name] += f"+{source.replace(':', '.')}"
        if top not in _distributions() and (source := _source_digest(top)):
            versions[top] = source
    return versions


def _is_editable(distribution: importlib.metadata.Distribution) -> bool:
    """Whether it is installed as a link to its sources (PEP 610)."""
    with contextlib.suppress(ValueError, AttributeError):
        return bool(json.loads(distribution.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))
    return False


@functools.cache
def _source_digest(top: str) -> str:
    """Digest of the sources of a module, such as one on PYTHONPATH; empty if it cannot be found."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    roots = [Path(root) for root in spec.submodule_search_locations or []]
    files = [(p.relative_to(root).as_posix(), p) for root in roots for p in sorted(root.rglob("*.py"))]
    if not roots and spec.origin and Path(spec.origin).is_file():
        files = [(Path(spec.origin).name, Path(spec.origin))]
    return "source:" + digest_of([[name, file_digest(file)] for name, file in files]) if files else ""


def _place(error: BaseException, code: UserCode, package: Package | None) -> str:
    """`file:line: ` of the innermost frame in the user's files."""
    if package is None:
        return ""
    shown = {package.shown_path(path): path for path in code.files if path.endswith(".py")}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in shown]
    return f"{shown[frames[-1].filename]}:{frames[-1].lineno}: " if frames else ""
