"""Which file does an import statement in a user's project mean?

A project may have its own `training/` or `penstock/`: inside user code a name means the user's file if there is one below the
project folder, and the installed package otherwise. The capture, which follows imports on disk, and the loader, which rewrites
them to a private package so that nothing in `sys.modules` clashes, both use this one rule.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Imported", "Layout", "dotted_name", "imports_in", "rewrite_imports"]


class Imported(NamedTuple):
    """One name bound by an import statement."""

    bound: str
    """The name in the importing scope; `*` for a star import, empty for `import_module("literal")`."""
    module: str
    """Dotted module name as written (absolute imports)."""
    path: str | None
    """Project path of the module: `a/b.py`, `a/__init__.py`, or `a/` for a folder without the latter. None: not the user's."""
    attribute: str | None
    """The name taken from the module; None if the module itself is bound."""
    leaf: str | None = None
    """For `import a.b.c`, which binds `a` and runs `a.b.c` too: the project path of the latter."""


class Layout:
    """The Python files of one project, by paths relative to its folder `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def is_file(self, path: str) -> bool:
        """Return whether the project has this file."""
        return (self._root / path).is_file()

    def find(self, parts: Sequence[str], below: str = "") -> str | None:
        """Return the path of module `parts` in folder `below`: a package, a file, or a plain folder (with a trailing slash)."""
        stem = "/".join([below, *parts] if below else parts)
        init = f"{stem}/__init__.py" if stem else "__init__.py"
        if self.is_file(init):
            return init
        if stem and self.is_file(f"{stem}.py"):
            return f"{stem}.py"
        has_sources = any(next(self._root.glob(f"{stem or '.'}/{pattern}"), None) for pattern in ("*.py", "*/*.py"))
        return f"{stem}/" if has_sources else None

    def absolute(self, name: str, importer: str) -> str | None:
        """Return the path of the module that `import name` in file `importer` means; None for an installed one.

        The project root counts first. A file beside the importing one is taken only where nothing of that name is installed.
        """
        parts = name.split(".")
        found = self.find(parts)
        return self.find(parts, importer.rpartition("/")[0]) if found is None and not _installed(parts[0]) else found


def imports_in(statement: ast.AST, importer: str, layout: Layout) -> Iterator[Imported]:
    """Resolve every import inside of a statement of project file `importer`, also `importlib.import_module("literal")`."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _imports_of(node, importer, layout)
        elif name := _literal_import(node):
            yield Imported("", name, layout.absolute(name, importer), None)


def _imports_of(node: ast.Import | ast.ImportFrom, importer: str, layout: Layout) -> list[Imported]:
    if isinstance(node, ast.Import):
        return [_plain_import(alias, importer, layout) for alias in node.names]
    module, folder = node.module or "", importer
    for _ in range(node.level):
        folder = folder.rpartition("/")[0]
    path = layout.find(module.split(".") if module else [], folder) if node.level else layout.absolute(module, importer)
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
    if path is not None and path.endswith("/") and layout.find([alias.name], path.rstrip("/")) is None:
        path = None  # a plain folder has only its submodules to offer
    return Imported(alias.asname or alias.name, module, path, alias.name)


def _literal_import(node: ast.AST) -> str | None:
    """Return the module named in `importlib.import_module("literal")` or `__import__("literal")`, else None."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(first := node.args[0], ast.Constant):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return first.value if name in ("import_module", "__import__") and isinstance(first.value, str) else None


def dotted_name(path: str) -> str:
    """Return the module name of a project path, relative to the root package. A dot in a file's name becomes `_`."""
    parts = path.removesuffix(".py").rstrip("/").split("/")
    return ".".join(part.replace(".", "_") for part in (parts[:-1] if parts[-1] == "__init__" else parts))


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
        names: list[ast.alias] = []
        for alias, item in zip(node.names, _imports_of(node, self._importer, self._layout), strict=True):
            names += [ast.alias(self._private(item.leaf))] if item.leaf else []
            names.append(alias if item.path is None else ast.alias(self._private(item.path), item.bound))
        return [ast.copy_location(ast.Import([name]), node) for name in names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        items = _imports_of(node, self._importer, self._layout)
        if node.level or all(item.path is None for item in items):  # the private package has the same folders
            return [node]
        modules = [node.module if item.path is None else self._private(item.path) for item in items]
        pairs = zip(modules, node.names, strict=True)
        return [ast.copy_location(ast.ImportFrom(module, [alias], 0), node) for module, alias in pairs]

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = _literal_import(node)
        path = None if name is None or name.startswith(".") else self._layout.absolute(name, self._importer)
        if path is not None and getattr(node.func, "id", "") != "__import__":
            node.args[0] = ast.copy_location(ast.Constant(self._private(path)), node.args[0])
        return node


def _installed(top: str) -> bool:
    try:  # penstock is always importable here, which does not show that the user meant it
        return top != "penstock" and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
