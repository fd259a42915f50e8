"""How are captured files imported so that they meet neither our modules nor another project's?

They are written below a folder only this user can write, and imported as one private package per content
(`penstock_user_<digest>`) with their imports of each other pointed into it. The working directory and `sys.path` play no part.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any

from penstock.digest import digest_of
from penstock.storage import Storage
from penstock.temporary import own_folder, remove_unowned, user_folder
from penstock.usercode.imports import Layout, dotted_name, rewrite_imports
from penstock.usercode.source import read_source_text

__all__ = ["BINARY", "CAPTURED", "Package", "file_content"]

BINARY = "base64:"
"""Prefix of a captured data file's content; Python files are kept as text."""

CAPTURED = "penstock_user_"
"""Begin of the names of captured modules."""


class Package(importlib.abc.MetaPathFinder):
    """One set of captured files as an importable package of this process; it finds its own modules, and no others."""

    _known: dict[str, Package] = {}  # noqa: RUF012 - one registry per process, guarded by the lock below
    _lock = threading.Lock()

    def __init__(self, root: str, files: dict[str, str], origin: str) -> None:
        self.root, self.files, self.origin = root, files, origin
        self.folder, self._owner = _write(files, root)
        self.layout = Layout(self.folder)
        self.modules = {f"{root}.{dotted_name(p)}".rstrip("."): p for p in sorted(files) if p.endswith(".py")}
        parts = [name.split(".") for name in self.modules]
        self.parents = {".".join(name[:end]) for name in parts for end in range(1, len(name))}

    @classmethod
    def of(cls, files: dict[str, str], origin: str) -> Package:
        """Return the package of these files (path to content) in this process, made on first use."""
        root = f"{CAPTURED}{digest_of(files)[:16]}"
        with cls._lock:
            if root not in cls._known:
                cls._known[root] = cls(root, files, origin)
                sys.meta_path.insert(0, cls._known[root])
            return cls._known[root]

    def shown_path(self, file: str) -> str:
        """Return the path that tracebacks show: of the user's own file while it has the same content, else of the copy."""
        original = Path(self.origin, file)
        with contextlib.suppress(OSError, SyntaxError, UnicodeDecodeError):
            if self.origin and read_source_text(original) == self.files[file]:
                return str(original)
        return str(self.folder / file)

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        """Find a module of this package. Called by Python's import."""
        file = self.modules.get(fullname)
        folder = str(self.folder.joinpath(*fullname.split(".")[1:]))
        if file is not None:
            folders = [folder] if file.endswith("__init__.py") else None
            location, loader = str(self.folder / file), _Loader(self, file)
            return importlib.util.spec_from_file_location(fullname, location, loader=loader, submodule_search_locations=folders)
        if fullname not in self.parents:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [folder]
        return spec


class _Loader(importlib.abc.InspectLoader):
    """Compiles a captured file with its imports pointed at the private package."""

    def __init__(self, package: Package, file: str) -> None:
        self._package, self._file = package, file

    def is_package(self, fullname: str) -> bool:
        return self._file.endswith("__init__.py")

    def get_source(self, fullname: str) -> str:
        return self._package.files[self._file]

    def get_code(self, fullname: str) -> CodeType:
        tree = rewrite_imports(ast.parse(self.get_source(fullname)), self._file, self._package.layout, self._package.root)
        return compile(tree, self._package.shown_path(self._file), "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self._package.parents and not hasattr(module, "__path__"):
            module.__path__ = []  # `model.py` beside a folder `model/`: both can be imported
        exec(self.get_code(module.__name__), module.__dict__)


def file_content(path: str, captured: str) -> bytes:
    """Return the bytes of a captured file."""
    is_data = captured.startswith(BINARY) and not path.endswith(".py")
    return base64.b64decode(captured.removeprefix(BINARY)) if is_data else captured.encode()


def _write(files: dict[str, str], root: str) -> tuple[Path, IO[bytes]]:
    """Write the files, each one atomically, to a folder that lasts while a process has them; return it and its lock."""
    folder = user_folder() / root
    owner = own_folder(folder, shared=True)
    remove_unowned(other for other in user_folder().glob(f"{CAPTURED}*") if other != folder)
    for path, content in files.items():
        target, data = folder / path, file_content(path, content)
        if not target.is_file() or target.read_bytes() != data:
            Storage(str(folder)).write_bytes(path, data)
    return folder, owner
