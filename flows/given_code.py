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
import linecache
import logging
import math
import os
import symtable
import sys
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.installed import versions_of
from penstock.messages import shorten
from penstock.storage import Storage
from penstock.usercode.source import DEFINITIONS, UserCodeError, bound_names, global_names

__all__ = ["GivenCode"]

_LONGEST_VALUE = 100_000
"""Characters of a value in the file; larger ones are data."""

_BESIDE = ("load_model", "loss", "predict", "predicts")
"""What the file of a function for Ray Train may have beside it (docs/ray-train.md)."""

_NEXT = "give values by train.params and rows by data=, or make it inside of the function"

_UNKNOWN = object()


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
        found = _find(value, name, where)
        self._added[id(value)] = found.name, value
        (node,) = ast.parse(found.text).body
        stripped = _Stripped().visit(node)
        try:
            names = global_names(stripped)
        except SyntaxError as error:  # `nonlocal`
            raise UserCodeError(f"{where} cannot be taken out of its program: {error.msg}", next_step=_NEXT) from error
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
            raise UserCodeError(f"{where} needs {lost[0]!r}, which is {problem}", next_step=_NEXT)
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
            text = _literal(value)
        if text is None or len(text) > _LONGEST_VALUE:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            shown = f"{kind} of {len(text):,} characters" if text else f"{kind}, {shorten(value)}"
            raise UserCodeError(f"{where} reads {name!r}, which does not travel with its code: {shown}", next_step=_NEXT)
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
            if path is None and _is_left_behind(value):
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
            if module and getattr(module, attribute, module) is value and (path or not _is_left_behind(module)):
                return f"from {_dotted(path) if path else module_name} import {attribute} as {name}"
        return None


class _Found(NamedTuple):
    """A definition in a program's source, taken out of it."""

    name: str
    text: str
    file: str
    names: Mapping[str, Any]
    """What names mean where it stands."""
    hidden: frozenset[str]
    """Names of the functions around it, whose values are not known."""


def _find(value: Any, name: str, where: str) -> _Found:
    """Find the definition of a function or class.

    Args:
        name: of a lambda.

    Raises:
        UserCodeError: there is none, or it cannot be told from others.
    """
    found: dict[str, tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda]]
    functions = _methods(value) if isinstance(value, type) else [inspect.unwrap(value)]
    if isinstance(value, type):
        home = getattr(sys.modules.get(value.__module__), "__file__", None)
        files = {each.__code__.co_filename: None for each in functions} or dict.fromkeys([home] if home else _cells())
        found = {
            ast.dump(node): (file, node)
            for file in files
            for node in ast.walk(_tree(file))
            if isinstance(node, ast.ClassDef) and node.name == value.__name__
            if all(node.lineno <= each.__code__.co_firstlineno <= (node.end_lineno or 0) for each in functions)
        }
    else:
        if not all(map(inspect.isfunction, functions)):
            raise UserCodeError(
                f"{where} is a {type(value).__name__} ({shorten(value)}), which has no definition of its own",
                next_step="give a function or a class itself, and values by train.params",
            )
        code = functions[0].__code__
        found = {
            str(index): (code.co_filename, node)
            for index, node in enumerate(ast.walk(_tree(code.co_filename)))
            if isinstance(node, (*DEFINITIONS, ast.Lambda))
            if getattr(node, "name", "<lambda>") == code.co_name and _first_line(node) == code.co_firstlineno
        }
    if len(found) != 1:
        problem = "has several definitions that may be meant" if found else "has no source that can be read"
        raise UserCodeError(
            f"{where} {problem}",
            next_step="define it once, by `def` or `class`, in a file or a notebook's cell, or restart the kernel",
        )
    ((file, node),) = found.values()
    if functions and functions[0] is not value and isinstance(node, ast.FunctionDef) and not node.decorator_list:
        raise UserCodeError(
            f"{where} has a wrapper that is not written as a decorator", next_step=f"write it as @ at {node.name}"
        )
    names, closure = dict(vars(sys.modules.get(value.__module__, builtins))), dict[str, Any]()
    for each in functions:
        names |= each.__globals__
        closure |= inspect.getclosurevars(each).nonlocals
    names |= closure
    around = _bound_around(symtable.symtable("".join(linecache.getlines(file)), file, "exec"), node) or frozenset()
    if isinstance(node, ast.ClassDef):
        is_written_anew = _fix_class(node, value, file, names, where)
    else:
        is_written_anew = _fix_defaults(node, functions[0], names, where)
    if isinstance(node, ast.Lambda):
        text = f"{name} = {ast.unparse(node)}"
    elif node.col_offset or is_written_anew:
        text, name = ast.unparse(node), node.name
    else:
        text, name = "".join(linecache.getlines(file)[_first_line(node) - 1 : node.end_lineno]).rstrip(), node.name
    return _Found(name, text, file, names, around - closure.keys())


def _bound_around(table: symtable.SymbolTable, node: Any, bound: frozenset[str] = frozenset()) -> frozenset[str] | None:
    """Return the names that the functions around a definition bind; None if it is not in the table."""
    if isinstance(table, symtable.Function):
        bound |= {*table.get_locals()}
    for child in table.get_children():
        if child.get_lineno() == node.lineno and child.get_name() == getattr(node, "name", "lambda"):
            return bound
        if (found := _bound_around(child, node, bound)) is not None:
            return found
    return None


def _fix_defaults(node: Any, function: Any, names: Mapping[str, Any], where: str) -> bool:
    """Write defaults as the values that they were given, unless they give these now; return whether any is written so."""
    lists = [(each, index) for each in (node.args.defaults, node.args.kw_defaults) for index in range(len(each)) if each[index]]
    made = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    is_written_anew = False
    for (defaults, index), now in zip(lists, made, strict=True):
        default, text = defaults[index], _literal(now)
        known = _known(default, names)
        if known is now or (text and text == _literal(known)):
            continue
        if text and len(text) <= _LONGEST_VALUE:
            defaults[index], is_written_anew = ast.parse(text, mode="eval").body, True
        elif known is not _UNKNOWN or global_names(ast.Expr(default)) - (vars(builtins).keys() - names.keys()):
            raise UserCodeError(f"{where} has a default, {ast.unparse(default)}, of another time or place", next_step=_NEXT)
    return is_written_anew


def _fix_class(node: ast.ClassDef, value: type, file: str, names: Mapping[str, Any], where: str) -> bool:
    """Fix the defaults of a class's functions; return whether any is written anew.

    Raises:
        UserCodeError: it has something that its source does not give it now.
    """
    body = {name: each for each in node.body for name in ([each.name] if isinstance(each, DEFINITIONS) else bound_names(each))}
    scope = {**names, **{name: each for name, each in vars(value).items() if name in body}}
    is_generated = type(value) not in (type, ABCMeta) or any("__init_subclass__" in vars(each) for each in value.__mro__[1:-1])
    is_generated |= issubclass(value, tuple)
    bases = zip(node.bases, vars(value).get("__orig_bases__", value.__bases__), strict=False)
    changed = [ast.unparse(base) for base, now in bases if _known(base, names) not in (now, _UNKNOWN)]
    anew = []
    for attribute, now in vars(value).items():
        name = attribute.removeprefix(f"_{value.__name__.lstrip('_')}") if attribute not in body else attribute
        now = getattr(value, "_field_defaults", {}).get(name, now)  # of a NamedTuple
        statement, text = body.get(name), _literal(now)
        function = inspect.unwrap(getattr(now, "__func__", getattr(now, "fget", now)))
        is_read = inspect.isfunction(function) and linecache.getlines(function.__code__.co_filename)
        line = function.__code__.co_firstlineno if is_read else 0
        is_inside = line and function.__code__.co_filename == file and _first_line(node) <= line <= (node.end_lineno or 0)
        if statement is None:
            is_own = line and not is_inside and _is_left_behind(sys.modules.get(function.__module__, builtins))
            is_changed = is_own or not (is_generated or attribute[:2] == "__" or attribute == "_abc_impl")
        elif isinstance(statement, ast.ClassDef):
            is_changed = getattr(now, "__qualname__", "") != f"{value.__qualname__}.{name}" and not statement.decorator_list
            if isinstance(now, type) and not is_changed:
                anew.append(_fix_class(statement, now, file, names, f"{where}.{name}"))
        elif isinstance(statement, DEFINITIONS):
            is_changed = not is_inside and not (statement.decorator_list and (not line or "<locals>" in function.__qualname__))
            if is_inside and line == _first_line(statement):
                anew.append(_fix_defaults(statement, function, scope, f"{where}.{name}"))
            else:
                is_changed |= not statement.decorator_list
        else:
            written = getattr(statement, "value", None)
            if isinstance(written, ast.Lambda) and is_inside:
                anew.append(_fix_defaults(written, function, scope, f"{where}.{name}"))
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            is_plain = isinstance(statement, ast.Assign | ast.AnnAssign) and all(isinstance(each, ast.Name) for each in targets)
            known = _known(written, names if written and ast.unparse(written) == name else scope) if written else None
            is_differing = line > 0 if text is None else text != _literal(known)
            is_changed = is_plain and known is not now and known is not _UNKNOWN and is_differing
        if is_changed:
            changed.append(attribute)
    if changed:
        raise UserCodeError(
            f"{where} is not as its source gives it now: {', '.join(changed)}",
            next_step="write the class as it is to be, and run its definition again",
        )
    return any(anew)


def _known(node: Any, names: Mapping[str, Any]) -> Any:
    """Return what an expression of names, attributes or literals gives now; _UNKNOWN for any other."""
    if isinstance(node, ast.Name):
        return names.get(node.id, vars(builtins).get(node.id, _UNKNOWN))
    if isinstance(node, ast.Attribute):
        return getattr(_known(node.value, names), node.attr, _UNKNOWN)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return _UNKNOWN


def _methods(value: type) -> list[Any]:
    """Return the functions that the body of a class defines, where their source can be read."""
    members = (getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(value).values())
    functions = (inspect.unwrap(each) for each in members if callable(each))
    return [
        each
        for each in functions
        if inspect.isfunction(each) and each.__qualname__.startswith(f"{value.__qualname__}.")
        if each.__module__ == value.__module__  # not of `collections`, which makes those of a NamedTuple
        if linecache.getlines(each.__code__.co_filename)
    ]


def _first_line(node: Any) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _cells() -> list[str]:
    """Return the names of sources that are not files, such as a notebook's cells."""
    return [name for name in linecache.cache if not Path(name).is_file()]


def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # of a cell with other syntax
        return ast.Module([], [])


def _statements(file: str) -> Iterator[ast.AST]:
    """Yield the nodes of a source, or of all cells."""
    for each in [file] if Path(file).is_file() else _cells():
        yield from ast.walk(_tree(each))


def _imports_of(name: str, file: str) -> Iterator[tuple[str, str]]:
    """Yield module and attribute of each `from ... import` in a source, or in all cells, that binds the name."""
    for node in _statements(file):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names if name == (alias.asname or alias.name))


def _path_in(module: Any, base_dir: Path) -> str | None:
    """Return the path of a module's file in the project; None if it is of a package that is installed, or lies elsewhere."""
    file = Path(getattr(module, "__file__", None) or os.devnull).resolve()
    if not file.is_relative_to(base_dir) or module.__name__ == "__main__" or file.suffix != ".py" or _is_installed(module):
        return None
    path = file.relative_to(base_dir)
    return path.as_posix() if all(part.isidentifier() for part in path.with_suffix("").parts) else None


def _is_installed(module: Any) -> bool:
    """Return whether a module is of Python or of an installed distribution."""
    top = module.__name__.partition(".")[0]
    return top == "penstock" or not versions_of({top}).get(top, "").startswith("source:")


def _is_left_behind(module: Any) -> bool:
    """Return whether a module is there in this process only: the program itself, or a file beside it."""
    beside = {Path.cwd(), Path(getattr(sys.modules["__main__"], "__file__", None) or "cell").resolve().parent}
    file = Path(getattr(module, "__file__", None) or os.devnull).resolve()
    is_beside = any(file.is_relative_to(folder) for folder in beside)
    return module.__name__ == "__main__" or (is_beside and not _is_installed(module))


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _literal(value: Any) -> str | None:
    """Return Python source of a plain value, the same in every process; None if it is another kind of value."""
    if value is None or type(value) in (bool, int, str, bytes) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    if type(value) is dict:
        parts = [(_literal(key), _literal(each)) for key, each in value.items()]
        return None if any(None in part for part in parts) else "{" + ", ".join(f"{key}: {each}" for key, each in parts) + "}"
    if type(value) in (list, tuple, set, frozenset):
        items = [_literal(each) for each in value]
        if None in items:
            return None
        text = ", ".join(sorted(map(str, items)) if isinstance(value, set | frozenset) else map(str, items))
        return f"[{text}]" if type(value) is list else f"{type(value).__name__}([{text}])"
    return None


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
    return _path_in(module, base_dir) or (None if _is_left_behind(module) else module.__name__)
