"""How does code that a program holds, from a script, a notebook's cell or a closure, become a file like any other?

An object that a module of the project or an installed package has under its name is named there. Of any other the source is
sliced: the definitions that it reaches, imports, and values that can be written down, as they are now. The rest of the program
is not part of the file, so that importing it does not run the program. What cannot be written down is refused by its name.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from penstock.errors import SpecError
from penstock.flows.given.definitions import (
    LONGEST_VALUE,
    NEXT,
    cells,
    find_definition,
    is_installed,
    is_left_behind,
    literal,
    refuse_secret,
    tree,
)
from penstock.flows.spec_file import GIVEN
from penstock.messages import shorten
from penstock.storage import Storage
from penstock.usercode.source import UserCodeError, global_names

__all__ = ["GivenCode", "write_spec"]

_BESIDE = ("load_model", "loss", "predict", "predicts")
"""What the file of a function for Ray Train may have beside it (docs/ray-train.md)."""


def write_spec(spec: Mapping[str, Any], is_draft: bool) -> tuple[Path, str]:
    """Write a program's spec, unless it is a draft, as a pipeline file of the working directory; return its path and text.

    Raises:
        SpecError: its name cannot be one of a file.
        UserCodeError: something in it cannot be written down.
    """
    name = str(spec.get("name", "pipeline"))
    if not re.fullmatch(r"[\w-]+", name):
        raise SpecError(f"name: {name!r} is not a name", next_step="use letters, digits, _ and -")
    values = GivenCode(Path.cwd(), f"{GIVEN}/{name}").plain(spec)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    if not is_draft:
        Storage(str(Path.cwd())).write_bytes(f"{GIVEN}/{name}.yaml", text.encode())
    return Path.cwd() / GIVEN / f"{name}.yaml", text


class GivenCode:
    """Writes objects of a program as files of a project.

    Args:
        base_dir: the project's folder.
        folder: where the files go, relative to it.
    """

    def __init__(self, base_dir: Path, folder: str) -> None:
        self._base_dir, self._folder = base_dir.resolve(), folder
        self._targets: dict[int, str] = {}

    def target(self, value: Any, is_loop: bool = False) -> str:
        """Return `path.py:Name` of a function or class, and write the file if the project has none.

        Args:
            is_loop: the file also gets what a Ray Train function's file may have.

        Raises:
            UserCodeError: something that it reaches cannot be written down, or has no source.
        """
        if id(value) not in self._targets:
            home = _home(value, self._base_dir)
            self._targets[id(value)] = f"{home}:{value.__name__}" if home else self._written(value, is_loop)
        return self._targets[id(value)]

    def _written(self, value: Any, is_loop: bool) -> str:
        reached = _Slice(self._base_dir)
        name = reached.add(value, "lambda_function", getattr(value, "__name__", type(value).__name__))
        beside = vars(sys.modules[value.__module__]) if is_loop else {}
        for each in _BESIDE:
            if getattr(beside.get(each), "__module__", "") == value.__module__ or isinstance(beside.get(each), str):
                try:
                    reached.add_name(each, beside[each], name, "")
                except UserCodeError as error:
                    raise UserCodeError(
                        f"{error.message}; {each} goes into the file of {name}, beside which it is defined",
                        next_step=f"rename {each} if it has nothing to do with {name}; otherwise: {error.next_step}",
                    ) from error
        taken = {target.partition(":")[0] for target in self._targets.values()}
        names = (f"{self._folder}/{name}{number or ''}.py" for number in range(len(taken) + 1))
        file = next(each for each in names if each not in taken)
        Storage(str(self._base_dir)).write_bytes(file, reached.text().encode())
        return f"{file}:{name}"

    def plain(self, value: Any, at: str = "spec") -> Any:
        """Return a value of a pipeline file: objects of code as their targets, paths as text, tuples as lists.

        Raises:
            UserCodeError: a value cannot be one of a pipeline file's.
        """
        if isinstance(value, Mapping):
            return {
                self.plain(key, at): self.plain(each, f"{at}.{getattr(key, '__name__', key)}") for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.plain(each, f"{at}.{index}") for index, each in enumerate(value)]
        if isinstance(value, Path):
            return str(value)
        if getattr(value, "ndim", None) == 0 and hasattr(value, "dtype"):  # a number of numpy
            return value.item()
        if (isinstance(value, type) or inspect.isroutine(value)) and "params" not in at.split("."):
            return self.target(value, is_loop=at == "spec.train.loop")
        if isinstance(value, str):
            refuse_secret(value, f"{at} holds a value")
        if value is None or isinstance(value, str | int | float):
            return value
        raise UserCodeError(
            f"{at} is a {type(value).__name__} ({shorten(value)}), which a pipeline file cannot hold",
            next_step="give a function or a class itself, its options as values, and rows by data=",
        )


class _Piece(NamedTuple):
    text: str
    at_once: frozenset[str]
    """Names that must be there when it is executed."""
    later: frozenset[str] = frozenset()
    """Names that its functions need when they are called."""


class _Slice:
    """What an object reaches: imports, values and definitions, by name."""

    def __init__(self, base_dir: Path) -> None:
        self._base_dir = base_dir
        self._imports: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._pieces: dict[str, _Piece] = {}
        self._added: dict[int, tuple[str, Any]] = {}

    def text(self) -> str:
        """Return the source of the file."""
        order: dict[str, None] = {}
        for name in self._pieces:
            self._place(name, order, whole=False)
        heads = ("\n".join(sorted({*self._imports.values()})), "\n".join(sorted(self._values.values())))
        parts = ["from __future__ import annotations", *filter(None, heads), *(self._pieces[name].text for name in order)]
        return "\n\n".join(parts) + "\n"

    def _place(self, name: str, order: dict[str, None], *, whole: bool, above: frozenset[str] = frozenset()) -> None:
        """Put a definition behind what it needs at once; that may call what it needs later (`whole`)."""
        piece = self._pieces.get(name)
        if piece is None or name in order or name in above:
            return
        for each in sorted(piece.at_once | (piece.later if whole else frozenset())):
            self._place(each, order, whole=True, above=above | {name})
        order.setdefault(name)
        for each in sorted(piece.later):
            self._place(each, order, whole=False, above=above)

    def add(self, value: Any, name: str, where: str) -> str:
        """Add a function or class with all that it reaches; return the name of its definition, `name` for a lambda."""
        if id(value) in self._added:
            return self._added[id(value)][0]
        found = find_definition(value, name, where)
        self._added[id(value)] = found.name, value
        (node,) = ast.parse(found.text).body
        stripped = _Stripped().visit(node)
        try:
            names = global_names(stripped)
        except SyntaxError as error:  # `nonlocal`
            raise UserCodeError(f"{where} cannot be taken out of its program: {error.msg}", next_step=NEXT) from error
        at_once = global_names(_WithoutBodies().visit(copy.deepcopy(stripped))) & names
        own = found.names.get(found.name, value) if found.name in names else value
        self._keep(found.name, where, found.text if inspect.unwrap(own) is inspect.unwrap(value) else "")
        names -= {found.name}
        known = (
            found.names.keys()
            | vars(builtins).keys()
            | {getattr(each, "asname", "") or getattr(each, "name", "") for each in ast.walk(stripped)}
        )
        known |= {each.id for each in ast.walk(stripped) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        if lost := sorted(each for each in names if each in found.hidden or (each not in known and each[:2] != "__")):
            problem = "a variable of the function around it, and does not travel" if lost[0] in found.hidden else "not defined"
            raise UserCodeError(f"{where} needs {lost[0]!r}, which is {problem}", next_step=NEXT)
        self._pieces[found.name] = _Piece(found.text, frozenset(at_once), frozenset(names - at_once))
        for name in sorted(names):
            if name == "__file__":
                raise UserCodeError(f"{where} reads __file__, and runs as a copy", next_step="name the file in train.params")
            if name in found.names and not name.startswith("__"):
                self.add_name(name, found.names[name], where, found.file)
        return found.name

    def add_name(self, name: str, value: Any, where: str, file: str) -> None:
        """Add what gives `name` in source file `file` this value."""
        if statement := self._import(name, value, where, file):
            self._keep(name, where, statement)
            self._imports[name] = statement
        elif isinstance(value, type) or inspect.isfunction(inspect.unwrap(value) if callable(value) else None):
            defined = self.add(value, name, f"{where} -> {name}")
            if defined != name:
                text = f"{name} = {defined}"
                self._keep(name, where, text)
                self._pieces[name] = _Piece(text, frozenset({defined}))
        else:
            self._add_value(name, value, where)

    def _add_value(self, name: str, value: Any, where: str) -> None:
        if isinstance(value, logging.Logger):
            self._imports["_getLogger"] = "from logging import getLogger as _getLogger"
            text: str | None = f"_getLogger({value.name!r})"
        else:
            text = literal(value)
        if text is None or len(text) > LONGEST_VALUE:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            shown = f"{kind} of {len(text):,} characters" if text else f"{kind}, {shorten(value)}"
            raise UserCodeError(f"{where} reads {name!r}, which does not travel with its code: {shown}", next_step=NEXT)
        refuse_secret(text, f"{where} reads {name!r},")
        self._keep(name, where, f"{name} = {text}")
        self._values[name] = f"{name} = {text}"

    def _keep(self, name: str, where: str, text: str) -> None:
        piece = self._pieces.get(name)
        known = piece.text if piece else self._imports.get(name) or self._values.get(name)
        if not text or known not in (None, text):
            raise UserCodeError(
                f"{where} reaches two different things that are called {name!r}",
                next_step="give one of them another name"
                + ("" if text else f"; if {name} is decorated, write @functools.wraps in the decorator"),
            )

    def _import(self, name: str, value: Any, where: str, file: str) -> str | None:
        """Return the statement that imports the value under this name where code runs; None if there is none."""
        if inspect.ismodule(value):
            path = _path_in(value, self._base_dir)
            if path is None and is_left_behind(value):
                raise UserCodeError(
                    f"{where} imports {value.__name__}, which does not travel: {value.__file__} is outside of {self._base_dir}",
                    next_step="move it there, or install it on every machine",
                )
            package = _dotted(path) if path else value.__name__
            for each in _statements(file):
                for alias in each.names if isinstance(each, ast.Import) else ():
                    if alias.name.startswith(f"{name}.") and not alias.asname and alias.name in sys.modules:
                        self._imports[alias.name] = f"import {package}{alias.name.removeprefix(name)}"
            return f"import {package} as {name}"
        for module_name, attribute in (
            *_imports_of(name, file),
            (getattr(value, "__module__", ""), getattr(value, "__name__", "")),
        ):
            module = sys.modules.get(module_name or "")
            path = None if module is None else _path_in(module, self._base_dir)
            if module and getattr(module, attribute, module) is value and (path or not is_left_behind(module)):
                return f"from {_dotted(path) if path else module_name} import {attribute} as {name}"
        return None


def _statements(file: str) -> Iterator[ast.AST]:
    """Yield the nodes of a source, or of all cells."""
    for each in [file] if Path(file).is_file() else cells():
        yield from ast.walk(tree(each))


def _imports_of(name: str, file: str) -> Iterator[tuple[str, str]]:
    """Yield module and attribute of each `from ... import` in a source, or in all cells, that binds the name."""
    for node in _statements(file):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names if name == (alias.asname or alias.name))


def _path_in(module: Any, base_dir: Path) -> str | None:
    """Return the path of a module's file in the project; None if it is of a package that is installed, or lies elsewhere."""
    file = Path(getattr(module, "__file__", None) or os.devnull).resolve()
    if not file.is_relative_to(base_dir) or module.__name__ == "__main__" or file.suffix != ".py" or is_installed(module):
        return None
    path = file.relative_to(base_dir)
    return path.as_posix() if all(part.isidentifier() for part in path.with_suffix("").parts) else None


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class _Stripped(ast.NodeTransformer):
    """Leaves annotations out, which are not read when the code runs (`from __future__ import annotations`)."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


class _WithoutBodies(ast.NodeTransformer):
    """Leaves out what runs only when a function is called."""

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        node.body = [ast.Pass()]
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        node.body = ast.Constant(None)
        return node


def _home(value: Any, base_dir: Path) -> str | None:
    """Return the file of the project, or the module of an installed package, that has a function or class under its name."""
    module, name = sys.modules.get(getattr(value, "__module__", None) or ""), getattr(value, "__name__", "")
    if module is None or getattr(module, name, None) is not value or module.__name__ == "__main__":
        return None
    return _path_in(module, base_dir) or (None if is_left_behind(module) else module.__name__)
