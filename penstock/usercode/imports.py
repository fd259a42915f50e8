"""Which file does an import statement in a user's project mean?

A user's project may have its own `training/` or `penstock/`: inside user code a name means the user's file if there is one
below the project folder, and the installed package otherwise. Both sides use this one rule: the capture, which follows imports
on disk, and the loader, which rewrites them to a private package so that nothing in `sys.modules` clashes.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ["Imported", "Layout", "dotted_name", "imports_of", "literal_import", "rewrite_imports"]


OWN_PACKAGES = frozenset({"penstock"})
"""Always importable in our processes, so their being installed says nothing about what the user meant."""


class Imported(NamedTuple):
    """One name bound by an import statement."""

    bound: str
    """The name in the importing scope; `*` for a star import."""
    module: str
    """Dotted module name as written (absolute imports)."""
    path: str | None
    """Project path of the module: `a/b.py`, `a/__init__.py`, or `a/` for a folder without the latter. None: not the user's."""
    attribute: str | None
    """The name taken from the module; None if the module itself is bound."""
    leaf: str | None = None
    """For `import a.b.c`, which binds `a` and runs `a.b.c` too: the project path of the latter."""


class Layout:
    """The files of one project, as paths relative to its root.

    Args:
        is_file: whether a relative posix path is a file of the project.
        has_sources: whether a relative folder holds Python files.
    """

    def __init__(self, is_file: Callable[[str], bool], has_sources: Callable[[str], bool]) -> None:
        self.is_file = is_file
        self.has_sources = has_sources

    @classmethod
    def on_disk(cls, root: Path) -> Layout:
        """The project in directory `root`."""

        def has_sources(folder: str) -> bool:
            return any(next(root.glob(f"{folder}/{pattern}"), None) for pattern in ("*.py", "*/*.py"))

        return cls(lambda path: (root / path).is_file(), has_sources)

    @classmethod
    def of_files(cls, files: Sequence[str]) -> Layout:
        """The project that consists of exactly these paths."""
        names = frozenset(files)
        folders = frozenset(str(parent) for name in names if name.endswith(".py") for parent in PurePosixPath(name).parents)
        return cls(names.__contains__, folders.__contains__)

    def find(self, parts: Sequence[str], below: str = "") -> str | None:
        """Path of module `parts` in folder `below`: a package, a file, or a plain folder (with a trailing slash)."""
        stem = "/".join([below, *parts] if below else parts)
        if stem and self.is_file(f"{stem}.py") and not self.is_file(f"{stem}/__init__.py"):
            return f"{stem}.py"
        init = f"{stem}/__init__.py" if stem else "__init__.py"
        if self.is_file(init):
            return init
        return f"{stem}/" if self.has_sources(stem or ".") else None

    def absolute(self, name: str, importer: str) -> str | None:
        """Path of the module an absolute import of `name` in file `importer` means; None for an installed one.

        The project root counts first. A file beside the importing one is taken only where nothing of that name is installed.
        """
        parts = name.split(".")
        found = self.find(parts)
        if found is None and not _installed(parts[0]):
            found = self.find(parts, _folder(importer))
        return found


def imports_of(node: ast.Import | ast.ImportFrom, importer: str, layout: Layout) -> list[Imported]:
    """Resolve every name that `node`, in project file `importer`, binds."""
    if isinstance(node, ast.Import):
        return [_plain_import(alias, importer, layout) for alias in node.names]
    module = node.module or ""
    if node.level:
        folder = _folder(importer)
        for _ in range(node.level - 1):
            folder = _folder(folder) if folder else ""
        path = layout.find(module.split(".") if module else [], folder)
    else:
        path = layout.absolute(module, importer)
    return [_from_import(alias, module, path, layout) for alias in node.names]


def _plain_import(alias: ast.alias, importer: str, layout: Layout) -> Imported:
    parts = alias.name.split(".")
    leaf = layout.absolute(alias.name, importer)
    if leaf is not None and leaf.endswith("/") and _installed(parts[0]):
        leaf = None  # as in Python, a folder without __init__.py gives way to an installed package
    if alias.asname or len(parts) == 1:
        return Imported(alias.asname or alias.name, alias.name, leaf, None)
    top = None if leaf is None else layout.absolute(parts[0], importer) or f"{parts[0]}/"
    return Imported(parts[0], alias.name, top, None, leaf)


def _from_import(alias: ast.alias, module: str, path: str | None, layout: Layout) -> Imported:
    bound = alias.asname or alias.name
    if path is not None and path.endswith("/") and layout.find([alias.name], path.rstrip("/")) is None:
        path = None  # a plain folder has only its submodules to offer
    return Imported(bound, module, path, alias.name)


def literal_import(node: ast.AST) -> str | None:
    """The module named in `importlib.import_module("literal")` or `__import__("literal")`, else None."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    first = node.args[0]
    if name in ("import_module", "__import__") and isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    return None


def dotted_name(path: str) -> str:
    """Module name of a project path, relative to the project's root package. A dot in a file's name becomes `_`."""
    parts = path.removesuffix(".py").rstrip("/").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(part.replace(".", "_") for part in parts)


def rewrite_imports(tree: ast.Module, importer: str, layout: Layout, root: str) -> ast.Module:
    """Point every absolute import of a project file at the private package `root`; positions stay as they are."""
    rewritten = _Rewriter(importer, layout, root).visit(tree)
    return ast.fix_missing_locations(rewritten)  # type: ignore[no-any-return]


class _Rewriter(ast.NodeTransformer):
    def __init__(self, importer: str, layout: Layout, root: str) -> None:
        self._importer, self._layout, self._root = importer, layout, root

    def _private(self, path: str) -> str:
        return f"{self._root}.{dotted_name(path)}".rstrip(".")

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for alias in node.names:
            item = _plain_import(alias, self._importer, self._layout)
            names = [alias]
            if item.path is not None:
                leaf = [ast.alias(self._private(item.leaf))] if item.leaf else []
                names = [*leaf, ast.alias(self._private(item.path), item.bound)]
            out.extend(ast.copy_location(ast.Import([name]), node) for name in names)
        return out

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        if node.level:  # the private package mirrors the folders, so relative imports hold by themselves
            return [node]
        out: list[ast.stmt] = []
        for alias, item in zip(node.names, imports_of(node, self._importer, self._layout), strict=True):
            module = node.module if item.path is None else self._private(item.path)
            out.append(ast.copy_location(ast.ImportFrom(module, [alias], 0), node))
        return out if any(item.module != node.module for item in out if isinstance(item, ast.ImportFrom)) else [node]

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = literal_import(node)
        path = None if name is None or name.startswith(".") else self._layout.absolute(name, self._importer)
        if path is not None and getattr(node.func, "id", "") != "__import__":
            node.args[0] = ast.copy_location(ast.Constant(self._private(path)), node.args[0])
        return node


def _folder(path: str) -> str:
    parent = str(PurePosixPath(path).parent)
    return "" if parent == "." else parent


def _installed(top: str) -> bool:
    if top in OWN_PACKAGES:
        return False
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
