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
    "executed_statements",
    "global_names",
    "path_literals",
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
        if isinstance(statement, ast.If) and ast.unparse(statement.test).split()[0] in (
            "__name__",
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            yield from executed_statements(statement.orelse)
        else:
            yield statement


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


def path_literals(statement: ast.stmt) -> set[str]:
    """Strings that may name a file: literals, and those joined by `/` or a call of `join` or `joinpath`."""
    found: set[str] = set()
    docstrings = {id(body[0]) for node in ast.walk(statement) if (body := _docstring_body(node))}
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if id(node) in docstrings:
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found.add("/".join(_division_literals(node)))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("join", "joinpath"):
            found.add("/".join(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)))
    return {
        text
        for text in found
        if 0 < len(text) < 256 and "\n" not in text and "\0" not in text and not text.startswith(("/", "~"))
    }


def _division_literals(node: ast.AST) -> list[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [*_division_literals(node.left), *_division_literals(node.right)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


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
