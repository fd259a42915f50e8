"""A public function that raises an error of penstock says so in its docstring, or the method that it overrides does."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from penstock import errors
from tests import ROOT
from tests.test_imports_point_one_way import MODULES

ERRORS = {name: {kind.__name__ for kind in getattr(errors, name).__mro__} & {*errors.__all__} for name in errors.__all__}
TREES = {path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in MODULES}
CLASSES = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def bases(node: ast.ClassDef) -> set[str]:
    """Names, without module and brackets."""
    return {ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases}


def methods(node: ast.ClassDef) -> dict[str, str]:
    """Docstrings by name, of what the class defines and inherits: one text for those that override each other."""
    found = {ast.unparse(each.targets[0]): "" for each in node.body if isinstance(each, ast.Assign)}  # in place of a property
    found |= {each.name: f"{ast.get_docstring(each)}\n" for each in node.body if isinstance(each, ast.FunctionDef)}
    above = bases(node)
    for base in (each for each in CLASSES if each.name in above):
        for name, text in methods(base).items():
            found[name] = found.get(name, "") + text
    return found


PROTOCOLS = [methods(node) for node in CLASSES if "Protocol" in bases(node)]


def raised_by(function: ast.FunctionDef) -> set[str]:
    """Names of penstock's errors that it raises itself; what it defines inside is left out."""
    nodes, found = list[ast.AST](function.body), set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(ast.unparse(node.exc.func))
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            nodes.extend(ast.iter_child_nodes(node))
    return found & ERRORS.keys()


def silent(node: ast.Module | ast.ClassDef, told: dict[str, str]) -> Iterator[str]:
    """Each public function that raises an error which its docstring does not name, nor `told`, that of what it overrides."""
    for each in (each for each in node.body if not getattr(each, "name", "_").startswith("_")):
        if isinstance(each, ast.ClassDef):
            own = methods(each)  # a class that has all methods of a protocol is one of its kind
            kinds = [own, *(protocol for protocol in PROTOCOLS if protocol.keys() <= own.keys())]
            yield from silent(each, {name: "".join(kind.get(name, "") for kind in kinds) for name in own})
        elif isinstance(each, ast.FunctionDef):
            said = f"{ast.get_docstring(each)}\n{told.get(each.name, '')}".partition("Raise")[2]
            missing = sorted(name for name in raised_by(each) if not any(kind in said for kind in ERRORS[name]))
            yield from (f"{each.lineno} {each.name}: {name}" for name in missing)


def test_a_public_function_says_which_errors_it_raises() -> None:
    assert [f"{path}:{found}" for path, tree in TREES.items() for found in silent(tree, {})] == []
