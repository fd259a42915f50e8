"""What does a piece of user code depend on? Digests of all it reaches, file by file, found by reading, never by running.

The walk starts at one name and follows names to definitions, through imports into other files of the project. Comments,
docstrings, positions and definitions that are not reached do not count. What cannot be followed (star imports, `getattr` on a
module, `exec`, `globals()`) makes the whole module count: the digest may change too often, never too seldom.
Known limit: an assignment that registers something as a side effect (`_ = register(f)`) counts only if its name is used.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from penstock.digest import digest_of, file_digest
from penstock.errors import SpecError
from penstock.usercode.imports import Imported, Layout, imports_of, literal_import
from penstock.usercode.secret_files import is_secret_file
from penstock.usercode.syntax import (
    DEFINITIONS,
    Definition,
    bound_names,
    canonical,
    chains,
    executed_statements,
    global_names,
    path_literals,
    read_source_text,
    without_docstring,
)

__all__ = ["SHIPPED_DATA_BYTES", "Closure", "UserCodeError", "secret_refused"]


SHIPPED_DATA_BYTES = 16 << 20
"""A data file above this size does not travel with the code; its name, size and modification time count, not its content."""

HARMLESS_DECORATORS = frozenset({"torch", "numpy", *sys.stdlib_module_names})
"""Modules whose decorators register nothing: an unused definition under one of them does not count."""

OPAQUE = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__"})


class UserCodeError(SpecError):
    """User code cannot be found, read, parsed or imported; the message names the target, the file and the line."""


@dataclass
class Module:
    """One parsed file: what each of its names means."""

    path: str
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, list[Imported]] = field(default_factory=dict)
    effects: list[ast.stmt] = field(default_factory=list)
    """Statements that act when the module is imported, in order."""
    statements: list[ast.stmt] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """Every name the module binds at its top level."""
        return {*self.definitions, *self.imports} - {"*"}


class Closure:
    """Everything that `name` in project file `path` reaches.

    Args:
        root: the project folder.
        path: project-relative path of the file to start in.
        name: the definition to start at.

    Raises:
        UserCodeError: a reached file does not parse, or `name` is not bound in `path`.
    """

    def __init__(self, root: Path, path: str, name: str) -> None:
        self._root = root
        self._layout = Layout.on_disk(root)
        self._modules: dict[str, Module] = {}
        self._reached: dict[str, dict[str, list[ast.stmt]]] = {}
        self._executed: dict[str, Module] = {}
        self._whole: set[str] = set()
        self.packages: set[str] = set()
        """Top-level names of the installed modules that reached code uses."""
        self.data: dict[str, str] = {}
        """Data files that reached code names, with the digest of each. Paths that start with `..` lie outside the project."""
        module = self._module(path)
        if name not in module.names and "*" not in module.imports and "__getattr__" not in module.names:
            close = difflib.get_close_matches(name, sorted(module.names), n=3, cutoff=0.5)
            hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else f"; it has {sorted(module.names)}"
            raise UserCodeError(f"{path} defines no {name!r}{hint}", next_step=f"correct `{path}:{name}` in the pipeline file")
        self._execute(path)
        self._reach(path, (name,))

    def digests(self) -> dict[str, str]:
        """File -> digest of what is reached in it: definitions of a module, all of a file that is named in a string."""
        modules = {
            path: digest_of(
                {
                    "effects": [canonical(node) for node in self._executed[path].effects],
                    "names": {name: [canonical(node) for node in nodes] for name, nodes in self._reached.get(path, {}).items()},
                }
            )
            for path in self._executed
        }
        return {**modules, **self.data}

    def sources(self) -> list[str]:
        """Project files that importing the reached files may run: more than what counts for the digest."""
        found: set[str] = set()
        waiting = list(self._executed)
        while waiting:
            path = waiting.pop()
            if path in found or path.endswith("/"):
                continue
            found.add(path)
            waiting.extend(self._parents(path))
            waiting.extend(
                target for statement in self._module(path).statements for target in self._imported_files(statement, path)
            )
        return sorted(found)

    def _imported_files(self, statement: ast.stmt, path: str) -> Iterator[str]:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for item in imports_of(node, path, self._layout):
                    yield from self._targets(item)
            elif (name := literal_import(node)) and (target := self._layout.absolute(name, path)):
                yield target

    def _targets(self, item: Imported) -> Iterator[str]:
        """The modules that one bound import runs."""
        if item.path is not None:
            yield item.path
            if item.leaf:
                yield from (*self._parents(item.leaf), item.leaf)
            if item.attribute and (submodule := self._submodule(item.path, item.attribute)):
                yield submodule

    def _submodule(self, path: str, name: str) -> str | None:
        if not path.endswith(("/", "__init__.py")):
            return None
        return self._layout.find([name], path.removesuffix("__init__.py").rstrip("/"))

    def _parents(self, path: str) -> list[str]:
        """The `__init__.py` files Python runs before `path`. One in the project folder itself is no parent."""
        folders = list(PurePosixPath(path).parents)[:-1]
        inits = (f"{folder}/__init__.py" for folder in reversed(folders))
        return [init for init in inits if init != path and self._layout.is_file(init)]

    def _module(self, path: str) -> Module:
        if path not in self._modules:
            self._modules[path] = Module(path) if path.endswith("/") else _parse(self._root, path, self._layout)
        return self._modules[path]

    def _execute(self, path: str) -> None:
        """Count what runs when `path` is imported: side effects, here and in everything it imports at its top level."""
        if path in self._executed:
            return
        for parent in self._parents(path):
            self._execute(parent)
        module = self._executed[path] = self._module(path)
        for item in (item for items in module.imports.values() for item in items):
            for target in self._targets(item):
                self._execute(target)
        for item in module.imports.get("*", ()):
            if item.path is not None:
                self._reach_whole(item.path)
            else:
                self.packages.add(item.module.split(".")[0])
        for statement in module.effects:
            self._follow(path, statement)
        for name, nodes in module.definitions.items():
            if any(isinstance(node, DEFINITIONS) and self._may_register(node, module) for node in nodes):
                self._reach(path, (name,))

    def _may_register(self, node: Definition, module: Module) -> bool:
        """Whether a decorator may put the definition somewhere else, so that it acts without being named."""
        for decorator in node.decorator_list:
            first = next(iter(chains(decorator)), ("",))[0]
            items = module.imports.get(first, [])
            harmless = any(item.path is None and item.module.split(".")[0] in HARMLESS_DECORATORS for item in items)
            if not harmless and not (first not in module.names and hasattr(builtins, first)):
                return True
        return False

    def _reach_whole(self, path: str) -> None:
        if path in self._whole:
            return
        self._whole.add(path)
        self._execute(path)
        for name in sorted(self._module(path).names):
            self._reach(path, (name,))

    def _reach(self, path: str, chain: tuple[str, ...]) -> None:
        """Follow `chain` (a name and the attributes taken from it) starting in the scope of module `path`."""
        name, *rest = chain
        module = self._module(path)
        if name in module.definitions:
            reached = self._reached.setdefault(path, {})
            if name not in reached:
                reached[name] = module.definitions[name]
                for statement in module.definitions[name]:
                    self._follow(path, statement)
        for item in module.imports.get(name, ()):
            self._reach_imported(item, tuple(rest))
        if name not in module.names and name in OPAQUE:
            self._reach_whole(path)

    def _reach_imported(self, item: Imported, rest: tuple[str, ...]) -> None:
        if item.path is None:
            self.packages.add(item.module.split(".")[0])
            return
        for target in self._targets(item):
            self._execute(target)
        self._reach_member(item.path, (item.attribute, *rest) if item.attribute else rest)

    def _reach_member(self, path: str, chain: tuple[str, ...]) -> None:
        """Follow attributes of module `path`; a module used as a value, or an attribute it does not bind, counts it whole."""
        if chain and chain[0] == "*":
            self._reach_whole(path)
        elif chain and chain[0] in self._module(path).names:
            self._execute(path)
            self._reach(path, chain)
        elif chain and (submodule := self._submodule(path, chain[0])):
            self._execute(submodule)
            self._reach_member(submodule, chain[1:])
        else:
            self._reach_whole(path)

    def _follow(self, path: str, statement: ast.stmt) -> None:
        """Reach everything a statement of module `path` names."""
        local: dict[str, list[Imported]] = {}
        for node in ast.walk(statement):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for item in imports_of(node, path, self._layout):
                    local.setdefault(item.bound, []).append(item)
            elif name := literal_import(node):
                if target := self._layout.absolute(name, path):
                    self._reach_whole(target)
                else:
                    self.packages.add(name.split(".")[0])
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
                self._reach_whole(path)
        seen = global_names(statement)
        for chain in chains(statement):
            if chain[0] in local:
                for item in local[chain[0]]:
                    self._reach_imported(item, chain[1:])
            elif chain[0] in seen:
                self._reach(path, chain)
        for items in local.values():
            for item in items:
                if item.attribute:
                    self._reach_imported(item, ())
                for target in self._targets(item):
                    self._execute(target)
        for literal in path_literals(statement):
            self._reach_data(literal, path)

    def _reach_data(self, literal: str, path: str) -> None:
        for folder in (self._root, (self._root / path).parent):
            try:
                file = (folder / literal).resolve()
                if not file.is_file():
                    continue
            except (OSError, ValueError):
                continue
            try:
                name = file.relative_to(self._root.resolve()).as_posix()
            except ValueError:
                name = f"../{literal}"
            if is_secret_file(literal) or is_secret_file(file.name):
                raise secret_refused(path, name)
            stat = file.stat()
            large = stat.st_size > SHIPPED_DATA_BYTES
            self.data[name] = f"size={stat.st_size} mtime_ns={stat.st_mtime_ns}" if large else file_digest(file)
            return


def secret_refused(code: str, file: str) -> UserCodeError:
    """Say that `code` names a file of secrets."""
    return UserCodeError(
        f"{code} names {file}, a file of secrets: what code names travels with it to the workers and into the model registry",
        next_step="read the secret from an environment variable (os.environ), and take the file's name out of the code",
    )


def _parse(root: Path, path: str, layout: Layout) -> Module:
    try:
        tree = ast.parse(read_source_text(root / path), filename=path)
    except SyntaxError as error:
        where = f"{path}:{error.lineno}"
        raise UserCodeError(f"{where} is no valid Python: {error.msg}", next_step=f"correct {where}") from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserCodeError(f"{path} cannot be read as Python source: {error}") from error
    module = Module(path)
    for statement in without_docstring(list(executed_statements(tree.body))):
        module.statements.append(statement)
        _bind(module, statement, layout)
    return module


def _bind(module: Module, statement: ast.stmt, layout: Layout) -> None:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        for item in imports_of(statement, module.path, layout):
            module.imports.setdefault(item.bound, []).append(item)
        return
    if isinstance(statement, DEFINITIONS):
        module.definitions.setdefault(statement.name, []).append(statement)
        return
    bound = bound_names(statement)
    for name in bound:
        module.definitions.setdefault(name, []).append(statement)
    assigns = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign))
    targets = [*getattr(statement, "targets", []), getattr(statement, "target", None)]
    plain = assigns and not any(isinstance(node, (ast.Attribute, ast.Subscript)) for node in targets)
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if not plain and not constant and not isinstance(statement, ast.Pass):
        module.effects.append(statement)
        for node in ast.walk(statement):  # names imported in `try:` and the like are names of the module
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for item in imports_of(node, module.path, layout):
                    module.imports.setdefault(item.bound, []).append(item)
