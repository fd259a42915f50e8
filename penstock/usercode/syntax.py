"""What does one statement of Python source bind, name and say, read off its syntax tree?"""

from __future__ import annotations

import ast
import symtable
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "DEFINITIONS",
    "Definition",
    "bound_names",
    "canonical",
    "chains",
    "docstrings_in",
    "executed_statements",
    "global_names",
    "read_source_text",
    "without_docstring",
]


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def read_source_text(file: Path) -> str:
    """Text of a Python file, in the encoding it declares."""
    with tokenize.open(file) as handle:
        return handle.read()


def executed_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: not the branch of `if __name__ == "__main__"` or `if TYPE_CHECKING`."""
    for statement in body:
        runs = _value_on_import(statement.test) if isinstance(statement, ast.If) else None
        if isinstance(statement, ast.If) and runs is not None:
            yield from executed_statements(statement.body if runs else statement.orelse)
        else:
            yield statement


def _value_on_import(test: ast.expr) -> bool | None:
    """What a test of `__name__` or `TYPE_CHECKING` gives when the file is imported; None where that is not known."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _value_on_import(test.operand)
        return None if value is None else not value
    if isinstance(test, ast.BoolOp):
        decisive = isinstance(test.op, ast.Or)
        values = [_value_on_import(part) for part in test.values]
        return decisive if decisive in values else None if None in values else not decisive
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
        sides = {ast.unparse(side) for side in (test.left, *test.comparators)}
        return isinstance(test.ops[0], ast.NotEq) if sides == {"__name__", "'__main__'"} else None
    return False if next(iter(chains(test)), ("",))[-1] == "TYPE_CHECKING" and not isinstance(test, ast.Call) else None


def bound_names(statement: ast.stmt) -> set[str]:
    """Names that the statement assigns or imports."""
    table = symtable.symtable(ast.unparse(statement), "<statement>", "exec")
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def global_names(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement takes from its module, also from inside functions and classes."""
    waiting = [symtable.symtable(ast.unparse(statement), "<statement>", "exec")]
    names: set[str] = set()
    while waiting:
        table = waiting.pop()
        waiting.extend(table.get_children())
        open_scope = table.get_type() != "function"  # in a class body, `x = x` reads the module's x
        names.update(s.get_name() for s in table.get_symbols() if s.is_global() or (open_scope and s.is_referenced()))
    return names


def chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Every name with the attributes taken from it: `a.b.c(x)` gives ("a", "b", "c") and ("x",)."""
    attributes: list[str] = []
    inner: ast.AST = node
    while isinstance(inner, ast.Attribute):
        attributes.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield (inner.id, *reversed(attributes))
        return
    for child in ast.iter_child_nodes(inner):
        yield from chains(child)


def docstrings_in(statement: ast.AST) -> set[int]:
    """Identities of the nodes that are docstrings."""
    return {id(body[0]) for node in ast.walk(statement) if (body := _docstring_body(node))}


def _docstring_body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)
    if isinstance(node, (*DEFINITIONS, ast.Module)) and isinstance(body, list) and len(without_docstring(body)) < len(body):
        return body
    return []


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements after the docstring, if there is one."""
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def canonical(node: Any) -> Any:
    """JSON of a syntax tree without positions, docstrings, `pass` and empty fields, the same on every Python version."""
    if isinstance(node, ast.Constant):
        return [type(node.value).__name__, repr(node.value)]
    if isinstance(node, ast.AST):
        fields = dict(ast.iter_fields(node))
        if isinstance(node, DEFINITIONS):
            fields["body"] = [child for child in without_docstring(node.body) if not isinstance(child, ast.Pass)]
        kept = {key: canonical(value) for key, value in fields.items() if value not in (None, []) and key != "type_comment"}
        return [type(node).__name__, kept]
    if isinstance(node, list):
        return [canonical(item) for item in node]
    return node if isinstance(node, (str, int)) else str(node)
