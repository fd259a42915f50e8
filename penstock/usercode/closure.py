"""What does a piece of user code depend on? Digests of all it reaches, file by file, found by reading, never by running.

The walk starts at one name and follows names to definitions, through imports into other files of the project. Comments,
docstrings, positions and definitions that are not reached do not count. What cannot be followed (star imports, `getattr` on a
module, `exec`, `globals()`) makes the whole module count: the digest may change too often, never too seldom. A definition that
may put itself somewhere when it is made (a decorator, `__init_subclass__`, a metaclass) counts though nobody names it.
Known limits: an assignment that registers something as a side effect (`_ = register(f)`) counts only if its name is used; and
what only a run can tell (environment variables, paths made of them) is in `limits`.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from penstock.digest import digest_of, file_digest
from penstock.usercode.imports import Imported, Layout, imports_of, literal_import
from penstock.usercode.module import Module, UserCodeError, only_names, parse_module
from penstock.usercode.paths import Paths, Values, paths_in, run_time_reads
from penstock.usercode.secret_files import is_secret_file
from penstock.usercode.syntax import (
    DEFINITIONS,
    Definition,
    canonical,
    chains,
    global_names,
    without_docstring,
)

__all__ = ["SHIPPED_DATA_BYTES", "Closure", "is_file", "secret_refused"]


SHIPPED_DATA_BYTES = 16 << 20
"""A data file above this size does not travel with the code; its name, size and modification time count, not its content."""

HARMLESS_DECORATORS = frozenset({"torch", "numpy", *sys.stdlib_module_names})
"""Modules whose decorators register nothing: an unused definition under one of them does not count."""

OPAQUE = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__"})


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
        self._files = Paths(set(), set(), set())
        """What reached code names, once found."""
        self._digests: dict[str, str] = {}
        self.limits: dict[str, None] = {}
        """What reached code reads that no key can know, as `file:line: what`, in order."""
        self._lists_subclasses = False
        module = self.module(path)
        if name not in module.names and "*" not in module.imports and "__getattr__" not in module.names:
            close = difflib.get_close_matches(name, sorted(module.names), n=3, cutoff=0.5)
            hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else f"; it has {sorted(module.names)}"
            raise UserCodeError(f"{path} defines no {name!r}{hint}", next_step=f"correct `{path}:{name}` in the pipeline file")
        self._execute(path)
        self._reach(path, (name,))
        if self._lists_subclasses:
            self._reach_subclasses()

    @property
    def data(self) -> dict[str, str]:
        """Data files that reached code names, with the digest of each. Those outside the project have absolute paths.

        Without those that it only writes: what it logs or draws would otherwise make it other code the next time.
        """
        files = self._files.named | (self._files.mentioned - self._files.written)
        return {name: digest for name, digest in self._digests.items() if name in files}

    def name_file(self, name: str) -> str | None:
        """Count a file that is named outside of the code. Returns its path in `data`; None where there is no such file."""
        return self._reach_data(name, "", self._files.named)

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

    def names(self) -> dict[str, tuple[str, ...]]:
        """File -> the names that are reached in it; none where only what it does on import counts."""
        return {path: tuple(self._reached.get(path, {})) for path in self._executed if not path.endswith("/")}

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
                target for statement in self.module(path).statements for target in self._imported_files(statement, path)
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

    def module(self, path: str) -> Module:
        """A file of the project, parsed."""
        if path not in self._modules:
            self._modules[path] = Module(path) if path.endswith("/") else parse_module(self._root, path, self._layout)
        return self._modules[path]

    def _execute(self, path: str) -> None:
        """Count what runs when `path` is imported: side effects, here and in everything it imports at its top level."""
        if path in self._executed:
            return
        for parent in self._parents(path):
            self._execute(parent)
        module = self._executed[path] = self.module(path)
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
        """Whether the definition may put itself somewhere when it is made, so that it acts without being named."""
        if any(not self._is_harmless(decorator, module) for decorator in node.decorator_list):
            return True
        return isinstance(node, ast.ClassDef) and (self._acts_when_made(node, module, ()) or _has_effects(node))

    def _is_harmless(self, expression: ast.expr, module: Module) -> bool:
        """Whether an expression is a builtin, or of a library that keeps no list of what it is given."""
        first = next(iter(chains(expression)), ("",))[0]
        items = module.imports.get(first, [])
        if any(item.path is None and item.module.split(".")[0] in HARMLESS_DECORATORS for item in items):
            return True
        return first not in module.names and hasattr(builtins, first)

    def _acts_when_made(self, node: ast.ClassDef, module: Module, seen: tuple[ast.ClassDef, ...]) -> bool:
        """Whether a metaclass or `__init_subclass__` of a base runs when the class, or one derived from it, is made."""
        if any(
            keyword.arg in ("metaclass", None) and not self._is_harmless(keyword.value, module) for keyword in node.keywords
        ):
            return True
        for base in node.bases:
            made = base.value if isinstance(base, ast.Subscript) else base
            if self._is_harmless(made, module):
                continue
            found = self.class_of(made, module)
            if found is None:
                return True
            derived, where = found
            hooks = [s for s in derived.body if isinstance(s, DEFINITIONS) and s.name == "__init_subclass__"]
            if hooks or (derived not in seen and self._acts_when_made(derived, where, (*seen, derived))):
                return True
        return False

    def class_of(self, expression: ast.expr, module: Module) -> tuple[ast.ClassDef, Module] | None:
        """The one class of the project that an expression names, with its module; None where reading cannot tell."""
        name, *rest = next(iter(chains(expression)), ("",)) if isinstance(expression, (ast.Name, ast.Attribute)) else ("",)
        nodes = module.definitions.get(name, [])
        if len(nodes) == 1 and not rest and name not in module.imports:
            return (nodes[0], module) if isinstance(nodes[0], ast.ClassDef) else None
        items = module.imports.get(name, [])
        if nodes or len(items) != 1 or items[0].path is None:
            return None
        path, names = items[0].path, [*filter(None, [items[0].attribute]), *rest]
        while len(names) > 1 and (submodule := self._submodule(path, names[0])):
            path, names = submodule, names[1:]
        if len(names) != 1:
            return None
        return self.class_of(ast.Name(names[0]), self.module(path))

    def _reach_subclasses(self) -> None:
        """`Base.__subclasses__()` finds every class that is derived from another, wherever it is named."""
        done: set[str] = set()
        while waiting := self._executed.keys() - done:
            for path in sorted(waiting):
                done.add(path)
                for name, nodes in self.module(path).definitions.items():
                    if any(isinstance(node, ast.ClassDef) and node.bases for node in nodes):
                        self._reach(path, (name,))

    def _reach_whole(self, path: str) -> None:
        if path in self._whole:
            return
        self._whole.add(path)
        self._execute(path)
        for name in sorted(self.module(path).names):
            self._reach(path, (name,))

    def _reach(self, path: str, chain: tuple[str, ...]) -> None:
        """Follow `chain` (a name and the attributes taken from it) starting in the scope of module `path`."""
        name, *rest = chain
        module = self.module(path)
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
        elif chain and chain[0] in self.module(path).names:
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
            elif isinstance(node, ast.Attribute) and node.attr == "__subclasses__":
                self._lists_subclasses = True
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
        values = self._values(path)
        for literals, names in zip(paths_in(statement, values), self._files, strict=True):
            for literal in literals:
                self._reach_data(literal, path, names)
        for line, what in run_time_reads(statement, values):
            self.limits[f"{path}:{line}: {what}"] = None

    def _values(self, path: str) -> Values:
        """What the names of a module may mean: what is assigned to them at its top level, or where they are imported from."""

        def values(name: str) -> list[tuple[ast.expr, Values]]:
            if name == "__file__":
                return [(ast.Constant(str(self._root.resolve() / path)), values)]
            found: list[tuple[ast.expr, Values]] = []
            for node in self.module(path).definitions.get(name, ()):
                named = [
                    target.id
                    for target in getattr(node, "targets", [getattr(node, "target", None)])
                    if isinstance(target, ast.Name)
                ]
                value = getattr(node, "value", None)
                if name in named and isinstance(value, ast.expr):
                    found.append((value, values))
            for item in self.module(path).imports.get(name, ()):
                if item.path is not None and item.attribute is not None and not item.path.endswith("/"):
                    found += self._values(item.path)(item.attribute) if item.path != path else []
            return found

        return values

    def _reach_data(self, literal: str, path: str, names: set[str]) -> str | None:
        """Add the file that a string in module `path` names to `names`, if there is one."""
        for folder in (self._root, (self._root / path).parent):
            if not is_file(folder / literal):
                continue
            file = (folder / literal).resolve()
            try:
                name = file.relative_to(self._root.resolve()).as_posix()
            except ValueError:
                name = file.as_posix()
            if name == path:  # `Path(__file__).parent` means the folder; of the file itself counts what is reached
                return None
            if is_secret_file(literal) or is_secret_file(file.name):
                raise secret_refused(path, name)
            names.add(name)
            if name in self._digests:
                return name
            stat = file.stat()
            large = stat.st_size > SHIPPED_DATA_BYTES
            self._digests[name] = f"size={stat.st_size} mtime_ns={stat.st_mtime_ns}" if large else file_digest(file)
            return name
        return None


def is_file(path: Path) -> bool:
    """Whether there is a file; text that can be no path is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _has_effects(node: ast.ClassDef) -> bool:
    """Whether the body of a class does more than to define what the class has."""
    plain = (*DEFINITIONS, ast.Pass, ast.Import, ast.ImportFrom)
    return any(not isinstance(statement, plain) and not only_names(statement) for statement in without_docstring(node.body))


def secret_refused(code: str, file: str) -> UserCodeError:
    """Say that `code` names a file of secrets."""
    return UserCodeError(
        f"{code} names {file}, a file of secrets: what code names travels with it to the workers and into the model registry",
        next_step="read the secret from an environment variable (os.environ), and take the file's name out of the code",
    )
