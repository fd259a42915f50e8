"""What does the code that a target reaches say, definition by definition? So that a change is reported by the function's name.

A record of it is small JSON: target -> file -> name -> source text, of reached definitions only.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from penstock.usercode.capture import UserCode
from penstock.usercode.syntax import DEFINITIONS, bound_names, canonical, executed_statements, without_docstring

__all__ = ["ON_IMPORT", "Definitions", "changed_names", "definitions_of"]

Definitions = dict[str, dict[str, str]]
"""File -> name of a definition -> its source."""

ON_IMPORT = "on import"
"""The name of what a module does when it is imported, beside its definitions."""


def definitions_of(code: UserCode) -> Definitions:
    """The source of every definition that `code` reaches in the project's Python files."""
    found: Definitions = {}
    for file, names in code.names.items():
        text = code.files.get(file)
        if text is None or not file.endswith(".py"):
            continue
        parts: dict[str, list[str]] = {}
        for statement in without_docstring(list(executed_statements(ast.parse(text).body))):
            if name := _reached_name(statement, set(names)):
                parts.setdefault(name, []).append(_source(text, statement))
        found[file] = {name: "\n".join(sources) for name, sources in parts.items()}
    return found


def changed_names(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The definitions of one file that differ, down to a class's methods; comments and docstrings do not count.

    A class that only one side has is named as a whole.
    """
    both = before.keys() & after.keys()
    old, new = (dict(_members(side, both)) for side in (before, after))
    return [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]


def _reached_name(statement: ast.stmt, names: set[str]) -> str | None:
    if isinstance(statement, DEFINITIONS):
        return statement.name if statement.name in names else None
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return None
    bound = sorted(bound_names(statement))
    if not bound:
        return ON_IMPORT
    return ", ".join(bound) if names & set(bound) else None


def _source(text: str, statement: ast.stmt) -> str:
    first = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : statement.end_lineno])


def _members(sources: Mapping[str, str], taken_apart: Collection[str]) -> Iterator[tuple[str, object]]:
    """(name, what it does) of each definition; a class that is taken apart gives its methods, and its rest, one by one."""
    for name, text in sources.items():
        body = ast.parse(text).body
        if name in taken_apart and len(body) == 1 and isinstance(body[0], ast.ClassDef):
            methods = [node for node in body[0].body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from ((f"{name}.{method.name}", canonical(method)) for method in methods)
            body[0].body = [node for node in body[0].body if node not in methods]
        yield name, canonical(body)
