"""How are captured files imported so that they meet neither our modules nor another project's?

They are written below a folder only this user can write, and imported as one private package per content
(`penstock_user_<digest>`) with their imports of each other pointed into it. The working directory and `sys.path` play no part.
"""

from __future__ import annotations

import ast
import base64
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO

from penstock.digest import digest_of
from penstock.temporary import own_folder, remove_unowned, user_folder
from penstock.usercode.imports import Layout, dotted_name, rewrite_imports
from penstock.usercode.syntax import read_source_text

__all__ = ["BINARY", "Package", "code_folders", "file_content"]


BINARY = "base64:"
"""Prefix of a captured data file's content; Python files are kept as text."""


class Package:
    """One set of captured files as an importable package of this process."""

    _known: dict[str, Package] = {}  # noqa: RUF012 - one registry per process, guarded by the lock below
    _lock = threading.Lock()

    def __init__(self, root: str, files: dict[str, str], origin: str) -> None:
        self.root = root
        self.files = files
        self.origin = origin
        self.layout = Layout.of_files(list(files))
        self.folder, self._owner = _write(files, root)
        self.modules = {f"{root}.{dotted_name(p)}".rstrip("."): p for p in sorted(files) if p.endswith(".py")}
        parts = [name.split(".") for name in self.modules]
        self.parents = {".".join(name[:end]) for name in parts for end in range(1, len(name))}

    @classmethod
    def of(cls, files: dict[str, str], origin: str) -> Package:
        """The package of these files (path to content) in this process, made on first use."""
        root = f"penstock_user_{digest_of(files)[:16]}"
        with cls._lock:
            if root not in cls._known:
                cls._known[root] = cls(root, files, origin)
                if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
                    sys.meta_path.insert(0, _Finder())
            return cls._known[root]

    @classmethod
    def named(cls, root: str) -> Package | None:
        """The package already made under that name, if any."""
        return cls._known.get(root)

    def shown_path(self, file: str) -> str:
        """The path tracebacks show: the user's own file while it still says the same, else the copy."""
        original = Path(self.origin, file)
        try:
            if self.origin and read_source_text(original) == self.files[file]:
                return str(original)
        except (OSError, SyntaxError, UnicodeDecodeError):
            pass
        return str(self.folder / file)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of private packages, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = Package.named(fullname.partition(".")[0])
        if package is None:
            return None
        file = package.modules.get(fullname)
        if file is None and fullname not in package.parents:
            return None
        folder = package.folder.joinpath(*fullname.split(".")[1:])
        if file is None:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            return spec
        is_package = file.endswith("__init__.py")
        location = str(package.folder / file)
        return importlib.util.spec_from_file_location(
            fullname, location, loader=_Loader(package, file), submodule_search_locations=[str(folder)] if is_package else None
        )


class _Loader(importlib.abc.InspectLoader):
    """Compiles a captured file with its imports pointed at the private package."""

    def __init__(self, package: Package, file: str) -> None:
        self._package, self._file = package, file

    def is_package(self, fullname: str) -> bool:
        return self._file.endswith("__init__.py")

    def get_source(self, fullname: str) -> str:
        return self._package.files[self._file]

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        tree = rewrite_imports(ast.parse(source), self._file, self._package.layout, self._package.root)
        return compile(tree, self._package.shown_path(self._file), "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in self._package.parents and not hasattr(module, "__path__"):
            module.__path__ = []  # `model.py` beside a folder `model/`: both can be imported
        exec(self.get_code(module.__name__), module.__dict__)


def file_content(path: str, captured: str) -> bytes:
    """What is in a captured file."""
    if captured.startswith(BINARY) and not path.endswith(".py"):
        return base64.b64decode(captured.removeprefix(BINARY))
    return captured.encode()


def code_folders() -> list[Path]:
    """Folders on this machine into which a process of this user has put captured code, those of processes that are gone too."""
    return [*user_folder().glob("penstock_user_*")]


def _write(files: dict[str, str], root: str) -> tuple[Path, IO[bytes]]:
    """Write the files, each one atomically, to a folder that lasts while a process has them; return it and its lock."""
    base = user_folder()
    folder = base / root
    owner = own_folder(folder, shared=True)
    remove_unowned(other for other in code_folders() if other != folder)
    for path, content in files.items():
        target = folder / path
        data = file_content(path, content)
        if target.is_file() and target.read_bytes() == data:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        temporary.write_bytes(data)
        os.replace(temporary, target)
    return folder, owner
