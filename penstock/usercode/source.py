"""What does a Python file of a project define, import, and do when it is imported? Read from its syntax tree, never run."""

from __future__ import annotations

import ast
import symtable
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import SpecError
from penstock.usercode.imports import Imported, Layout, imports_in

__all__ = [
    "DEFINITIONS",
    "Definition",
    "Module",
    "UserCodeError",
    "bound_names",
    "canonical",
    "chains",
    "global_names",
    "only_names",
    "parse_module",
    "read_source_text",
    "string_literals",
    "without_docstring",
]

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_FALSE_ON_IMPORT = {"__name__ == '__main__'", "'__main__' == __name__", "TYPE_CHECKING", "typing.TYPE_CHECKING"}


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
    runs: list[Imported] = field(default_factory=list)
    """All imports, also those inside of functions."""

    @property
    def names(self) -> set[str]:
        """Every name the module binds at its top level."""
        return {*self.definitions, *self.imports} - {"*"}


def parse_module(root: Path, path: str, layout: Layout) -> Module:
    """Read a file of the project in `root`. Raises UserCodeError: it is not valid Python, or cannot be read."""
    try:
        tree = ast.parse(read_source_text(root / path), filename=path)
    except SyntaxError as error:
        where = f"{path}:{error.lineno}"
        raise UserCodeError(f"{where} is not valid Python: {error.msg}", next_step=f"correct {where}") from error
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserCodeError(f"{path} cannot be read as Python source: {error}") from error
    module = Module(path)
    for statement in without_docstring(list(_executed(tree.body))):
        found = [*imports_in(statement, path, layout)]
        module.runs += found
        is_import = isinstance(statement, (ast.Import, ast.ImportFrom))
        acts = not isinstance(statement, (*DEFINITIONS, ast.Pass)) and not is_import and not only_names(statement)
        for name in [] if is_import else [statement.name] if isinstance(statement, DEFINITIONS) else bound_names(statement):
            module.definitions.setdefault(name, []).append(statement)
        if acts:
            module.effects.append(statement)
        for item in found if acts or is_import else ():  # names imported in `try:` and the like are names of the module
            if item.bound:
                module.imports.setdefault(item.bound, []).append(item)
    return module


def read_source_text(file: Path) -> str:
    """Read a Python file in the encoding that it declares."""
    with tokenize.open(file) as handle:
        return handle.read()


def _executed(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run on import: not the branch of `if __name__ == "__main__"` or `if TYPE_CHECKING`."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in _FALSE_ON_IMPORT:
            yield from _executed(statement.orelse)
        else:
            yield statement


def only_names(statement: ast.stmt) -> bool:
    """Return whether the statement is a constant, or gives values to nothing but names of its own."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return not any(isinstance(node, (ast.Attribute, ast.Subscript)) for target in targets for node in ast.walk(target))


def bound_names(statement: ast.stmt) -> set[str]:
    """Return the names that the statement assigns or imports."""
    table = symtable.symtable(ast.unparse(statement), "<statement>", "exec")
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


def global_names(statement: ast.stmt) -> set[str]:
    """Return the names that a top-level statement takes from its module, also inside functions and classes."""
    waiting = [symtable.symtable(ast.unparse(statement), "<statement>", "exec")]
    names: set[str] = set()
    while waiting:
        table = waiting.pop()
        waiting.extend(table.get_children())
        open_scope = table.get_type() != "function"  # in a class body, `x = x` reads the module's x
        names.update(s.get_name() for s in table.get_symbols() if s.is_global() or (open_scope and s.is_referenced()))
    return names


def chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield every name with the attributes taken from it: `a.b.c(x)` gives ("a", "b", "c") and ("x",)."""
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


def string_literals(statement: ast.AST) -> set[str]:
    """Return the string literals, and those of one path expression joined.

    `HERE / "a" / "b.txt"` and `os.path.join(HERE, "a", "b.txt")` give `a`, `b.txt` and `a/b.txt`.
    """
    found: set[str] = set()
    for node in ast.walk(statement):
        joins = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("join", "joinpath")
        if joins or isinstance(node, ast.Constant) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
            parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            parts.sort(key=lambda part: (part.lineno, part.col_offset))
            found.add("/".join(str(part.value) for part in parts))
    return found


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements after the docstring, if there is one."""
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def canonical(node: Any) -> Any:
    """Return JSON of a syntax tree without positions, docstrings, `pass` and empty fields, equal on every Python version."""
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
