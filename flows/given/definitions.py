"""Where is a function or class of a program defined, and does its definition still give what it is now?"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import math
import os
import symtable
import sys
from abc import ABCMeta
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.installed import versions_of
from penstock.messages import shorten
from penstock.redact import holds_own_secret
from penstock.usercode.source import DEFINITIONS, UserCodeError, bound_names, global_names

__all__ = [
    "LONGEST_VALUE",
    "NEXT",
    "Definition",
    "cells",
    "find_definition",
    "is_installed",
    "is_left_behind",
    "literal",
    "refuse_secret",
    "tree",
]

LONGEST_VALUE = 100_000
"""Characters of a value in the file; larger ones are data."""

NEXT = "give values by train.params and rows by data=, or make it inside of the function"

_UNKNOWN = object()


class Definition(NamedTuple):
    """A definition in a program's source, taken out of it."""

    name: str
    text: str
    file: str
    names: Mapping[str, Any]
    """What names mean where it stands."""
    hidden: frozenset[str]
    """Names of the functions around it, whose values are not known."""


def find_definition(value: Any, name: str, where: str) -> Definition:
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
        files = {each.__code__.co_filename: None for each in functions} or dict.fromkeys([home] if home else cells())
        found = {
            ast.dump(node): (file, node)
            for file in files
            for node in ast.walk(tree(file))
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
            for index, node in enumerate(ast.walk(tree(code.co_filename)))
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
    return Definition(name, text, file, names, around - closure.keys())


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
        default, text = defaults[index], literal(now)
        known = _known(default, names)
        if known is now or (text and text == literal(known)):
            continue
        if text and len(text) <= LONGEST_VALUE:
            refuse_secret(text, f"{where} has a default, {ast.unparse(default)},")
            defaults[index], is_written_anew = ast.parse(text, mode="eval").body, True
        elif known is not _UNKNOWN or global_names(ast.Expr(default)) - (vars(builtins).keys() - names.keys()):
            raise UserCodeError(f"{where} has a default, {ast.unparse(default)}, of another time or place", next_step=NEXT)
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
        statement, text = body.get(name), literal(now)
        function = inspect.unwrap(getattr(now, "__func__", getattr(now, "fget", now)))
        is_read = inspect.isfunction(function) and linecache.getlines(function.__code__.co_filename)
        line = function.__code__.co_firstlineno if is_read else 0
        is_inside = line and function.__code__.co_filename == file and _first_line(node) <= line <= (node.end_lineno or 0)
        if statement is None:
            is_own = line and not is_inside and is_left_behind(sys.modules.get(function.__module__, builtins))
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
            is_differing = line > 0 if text is None else text != literal(known)
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


def cells() -> list[str]:
    """Return the names of sources that are not files, such as a notebook's cells."""
    return [name for name in linecache.cache if not Path(name).is_file()]


def tree(file: str) -> ast.Module:
    """Parse a source; empty if it is not Python."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # of a cell with other syntax
        return ast.Module([], [])


def is_installed(module: Any) -> bool:
    """Return whether a module is of Python or of an installed distribution."""
    top = module.__name__.partition(".")[0]
    return top == "penstock" or not versions_of({top}).get(top, "").startswith("source:")


def is_left_behind(module: Any) -> bool:
    """Return whether a module is there in this process only: the program itself, or a file beside it."""
    beside = {Path.cwd(), Path(getattr(sys.modules["__main__"], "__file__", None) or "cell").resolve().parent}
    file = Path(getattr(module, "__file__", None) or os.devnull).resolve()
    is_beside = any(file.is_relative_to(folder) for folder in beside)
    return module.__name__ == "__main__" or (is_beside and not is_installed(module))


def refuse_secret(text: str, which: str) -> None:
    """Raise UserCodeError if a value holds a secret: its file stays with the run, and with its model."""
    if holds_own_secret(text):
        problem = f"{which} which looks like a secret, and is recorded with the run"
        raise UserCodeError(problem, next_step="read it from the environment inside of the function or class that needs it")


def literal(value: Any) -> str | None:
    """Return Python source of a plain value, the same in every process; None if it is another kind of value."""
    if value is None or type(value) in (bool, int, str, bytes) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    if type(value) is dict:
        parts = [(literal(key), literal(each)) for key, each in value.items()]
        return None if any(None in part for part in parts) else "{" + ", ".join(f"{key}: {each}" for key, each in parts) + "}"
    if type(value) in (list, tuple, set, frozenset):
        items = [literal(each) for each in value]
        if None in items:
            return None
        text = ", ".join(sorted(map(str, items)) if isinstance(value, set | frozenset) else map(str, items))
        return f"[{text}]" if type(value) is list else f"{type(value).__name__}([{text}])"
    return None
