"""What does a piece of user code depend on? Digests of all that it reaches, file by file, found by reading, never by running.

The walk starts at one name and follows names to definitions, through imports into other files of the project. Comments,
docstrings, positions and definitions that are not reached do not count. What cannot be followed (star imports, `getattr` on a
module, `exec`, `globals()`) makes the whole module count: the digest may change too often, never too seldom. A definition that
may register itself when it is made (a decorator, `__init_subclass__`, a metaclass) counts though nothing names it.
Known limit: an assignment that registers something as a side effect (`_ = register(f)`) counts only if its name is used.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from penstock.digest import digest_of
from penstock.messages import did_you_mean
from penstock.usercode.imports import Imported, Layout, imports_in
from penstock.usercode.source import (
    DEFINITIONS,
    Definition,
    Module,
    UserCodeError,
    canonical,
    chains,
    global_names,
    only_names,
    parse_module,
    string_literals,
    without_docstring,
)

__all__ = ["Closure"]

_HARMLESS = frozenset({"torch", "numpy", *sys.stdlib_module_names})
"""Modules that keep no list of what they decorate or derive: an unused definition made with them does not count."""

_OPAQUE = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__"})

_OPAQUE_WORDS = frozenset({"import_module", "getmodule", "__globals__", "f_globals", "run_path", "resolve_name"})

_OPAQUE_CHAINS = frozenset({("sys", "modules"), ("builtins", "eval"), ("builtins", "exec")})


class Closure:
    """Everything that the definition `name` in file `path` of the project in folder `root` reaches.

    Raises UserCodeError: a reached file does not parse, or `name` is not bound in `path`.
    """

    def __init__(self, root: Path, path: str, name: str) -> None:
        self._root = root
        self._layout = Layout(root)
        self._modules: dict[str, Module] = {}
        self._reached: dict[str, dict[str, list[ast.stmt]]] = {}
        self._executed: dict[str, Module] = {}
        self._whole: set[str] = set()
        self._lists_subclasses = False
        self.packages: set[str] = set()
        """Top-level names of the installed modules that reached code uses."""
        self.texts: set[tuple[str, str]] = set()
        """(file, string literal) of reached code."""
        self.variables: dict[str, None] = {}
        """Where reached code reads environment variables, as `file:line`, in order."""
        module = self._module(path)
        if name not in module.names and "*" not in module.imports and "__getattr__" not in module.names:
            hint = did_you_mean(name, module.names, most=3, cutoff=0.5) or f"; it has {sorted(module.names)}"
            raise UserCodeError(f"{path} defines no {name!r}{hint}", next_step=f"correct `{path}:{name}` in the pipeline file")
        self._execute(path)
        self._reach(path, (name,))
        while self._lists_subclasses and (waiting := self._executed.keys() - self._whole):
            self._reach_whole(min(waiting))  # `Base.__subclasses__()` finds derived classes in every module

    @property
    def sources(self) -> list[str]:
        """Project files that importing the target, and calling what it reaches, may run."""
        return sorted(path for path in self._executed if not path.endswith("/"))

    def digests(self) -> dict[str, str]:
        """Return `file:name` -> digest of each definition that is reached; `file:import` is what an import of the file does."""
        return {
            f"{path}:{name}": digest_of([canonical(node) for node in nodes])
            for path, module in self._executed.items()
            for name, nodes in {"import": module.effects, **self._reached.get(path, {})}.items()
            if nodes
        }

    def _module(self, path: str) -> Module:
        if path not in self._modules:
            self._modules[path] = Module(path) if path.endswith("/") else parse_module(self._root, path, self._layout)
        return self._modules[path]

    def _targets(self, item: Imported) -> Iterator[str]:
        """Yield the project's modules that one bound import runs."""
        if item.path is not None:
            yield item.path
            if item.leaf:
                yield from (*self._parents(item.leaf), item.leaf)
            if item.attribute and (submodule := self._submodule(item.path, item.attribute)):
                yield submodule

    def _submodule(self, path: str, name: str) -> str | None:
        is_package = name != "*" and path.endswith(("/", "__init__.py"))
        return self._layout.find([name], path.removesuffix("__init__.py").rstrip("/")) if is_package else None

    def _parents(self, path: str) -> list[str]:
        """Return the `__init__.py` files that Python runs before `path`. One in the project folder itself is not a parent."""
        inits = (f"{folder}/__init__.py" for folder in reversed(list(PurePosixPath(path).parents)[:-1]))
        return [init for init in inits if init != path and self._layout.is_file(init)]

    def _execute(self, path: str) -> None:
        """Count the side effects of importing `path`, here and in every file that it may import, early or late."""
        if path in self._executed:
            return
        for parent in self._parents(path):
            self._execute(parent)
        module = self._executed[path] = self._module(path)
        for target in [each for item in module.runs for each in self._targets(item)]:
            self._execute(target)
        for item in module.imports.get("*", ()):
            self._reach_imported(path, item, ())
        for statement in module.effects:
            self._follow(path, statement)
        for name, nodes in module.definitions.items():
            if any(isinstance(node, DEFINITIONS) and self._may_register(node, module) for node in nodes):
                self._reach(path, (name,))

    def _may_register(self, node: Definition, module: Module, derived: tuple[ast.stmt, ...] = ()) -> bool:
        """Return whether the definition may register itself when it is made, so that it acts without being named."""
        makers = [*node.decorator_list]
        if isinstance(node, ast.ClassDef):
            makers += [keyword.value for keyword in node.keywords if keyword.arg in ("metaclass", None)]
            plain = (*DEFINITIONS, ast.Pass, ast.Import, ast.ImportFrom)
            acts = any(not isinstance(each, plain) and not only_names(each) for each in without_docstring(node.body))
            if acts or any(self._registers_derived(base, module, (*derived, node)) for base in node.bases):
                return True
        return any(not self._is_harmless(each, module) for each in makers)

    def _is_harmless(self, expression: ast.expr, module: Module) -> bool:
        """Return whether an expression is a builtin, or of a library that keeps no list of the definitions that it makes."""
        first, *rest = next(iter(chains(expression)), ("",))
        for item in module.imports.get(first, []):
            if item.path is None and item.module.split(".")[0] in _HARMLESS:
                words = (*rest, *item.module.split("."), item.attribute or "")
                return not any(word == "library" or word.startswith("register") for word in words)  # such as torch.library
        return first not in module.names and hasattr(builtins, first)

    def _registers_derived(self, base: ast.expr, module: Module, derived: tuple[ast.stmt, ...]) -> bool:
        """Return whether a base class, or one that it derives from, may keep a list of the classes that are derived from it."""
        if self._is_harmless(base, module):
            return False
        name, *rest = next(iter(chains(base)), ("",))
        classes, imports = module.definitions.get(name, []), module.imports.get(name, [])
        if len(imports) == 1 and not classes and not rest and imports[0].path and imports[0].attribute:
            return self._registers_derived(ast.Name(imports[0].attribute), self._module(imports[0].path), derived)
        if rest or imports or not classes:
            return True
        return any(
            not isinstance(each, ast.ClassDef)
            or any(getattr(member, "name", "") == "__init_subclass__" for member in each.body)
            or (each not in derived and self._may_register(each, module, derived))
            for each in classes
        )

    def _reach_whole(self, path: str) -> None:
        if path not in self._whole:
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
            self._reach_imported(path, item, tuple(rest))
        if name not in module.names and name in _OPAQUE:
            self._reach_whole(path)

    def _reach_imported(self, path: str, item: Imported, rest: tuple[str, ...]) -> None:
        if item.path is None:
            full = (*item.module.split("."), *filter(None, [item.attribute]), *rest)
            self.packages.add(full[0])
            if full[:2] in _OPAQUE_CHAINS or not _OPAQUE_WORDS.isdisjoint(full):
                self._reach_whole(path)
        else:
            self._reach_member(item.path, (item.attribute, *rest) if item.attribute else rest)

    def _reach_member(self, path: str, chain: tuple[str, ...]) -> None:
        """Follow attributes of module `path`; a module used as a value, or an attribute it does not bind, counts it whole."""
        self._execute(path)
        if chain and chain[0] in self._module(path).names:
            self._reach(path, chain)
        elif chain and (submodule := self._submodule(path, chain[0])):
            self._reach_member(submodule, chain[1:])
        else:
            self._reach_whole(path)

    def _follow(self, path: str, statement: ast.stmt) -> None:
        """Reach everything that a statement of module `path` names."""
        self.texts |= {(path, text) for text in string_literals(statement)}
        local: dict[str, list[Imported]] = {}
        for item in imports_in(statement, path, self._layout):
            local.setdefault(item.bound, []).append(item)
            if item.attribute or not item.bound:
                self._reach_imported(path, item, ())
        for node in ast.walk(statement):
            word = getattr(node, "attr", None) or getattr(node, "id", None)
            self._lists_subclasses |= word == "__subclasses__"
            if word in _OPAQUE_WORDS:
                self._reach_whole(path)
            elif word in ("environ", "getenv"):
                self.variables[f"{path}:{getattr(node, 'lineno', 0)}"] = None
        seen = global_names(statement)
        for chain in chains(statement):
            if chain[0] in local:
                for item in local[chain[0]]:
                    self._reach_imported(path, item, chain[1:])
            elif chain[0] in seen:
                self._reach(path, chain)
