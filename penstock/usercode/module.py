"""What does one Python file of a project define, import, and do when it is imported? Read, never run."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SpecError
from penstock.usercode.imports import Imported, Layout, imports_of
from penstock.usercode.syntax import DEFINITIONS, bound_names, executed_statements, read_source_text, without_docstring

__all__ = ["Module", "UserCodeError", "only_names", "parse_module"]


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


def parse_module(root: Path, path: str, layout: Layout) -> Module:
    """Read a file of the project in `root`. Raises UserCodeError: it is no valid Python, or cannot be read."""
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
    if not only_names(statement) and not isinstance(statement, ast.Pass):
        module.effects.append(statement)
        for node in ast.walk(statement):  # names imported in `try:` and the like are names of the module
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for item in imports_of(node, module.path, layout):
                    module.imports.setdefault(item.bound, []).append(item)


def only_names(statement: ast.stmt) -> bool:
    """Whether the statement is a constant, or gives values to nothing but names of its own."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    targets = [*getattr(statement, "targets", []), getattr(statement, "target", None)]
    stores = [node for target in targets if target is not None for node in ast.walk(target)]
    return isinstance(statement, (ast.Assign, ast.AnnAssign)) and not any(
        isinstance(node, (ast.Attribute, ast.Subscript)) for node in stores
    )
