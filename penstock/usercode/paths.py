"""Which files and environment variables may a piece of user code read, as far as reading it can tell?

Paths are put together as the code would do it: from literals, from `__file__`, and from names that are assigned once or more
(`ASSETS = Path(__file__).parent / "assets"`). What a path is made of at run time, nobody can know; such places are named.
"""

from __future__ import annotations

import ast
import os.path
import posixpath
from collections.abc import Callable, Iterator
from itertools import product

from penstock.usercode.syntax import docstrings_in

__all__ = ["Values", "paths_in", "run_time_reads"]

Values = Callable[[str], "list[tuple[ast.expr, Values]]"]
"""What a name may mean: expressions that are assigned to it, each with the meaning of the names in it."""

_MOST = 16
"""Values followed of one name or expression."""

_STEPS = 200
"""Looked at for one expression: code may assign a name from itself."""

_UNCHANGED = frozenset(
    {"Path", "PurePath", "PosixPath", "str", "fspath", "resolve", "absolute", "abspath", "realpath", "normpath"}
)

_MODE_CHARS = 3
"""`path.open("rb")`: so short a string is no path."""

_READERS = frozenset({"open", "read_text", "read_bytes", "read_csv", "read_parquet", "read_json", "loadtxt", "load_file"})


def paths_in(statement: ast.stmt, values: Values) -> set[str]:
    """Every string in the statement that may name a file: literals, and what they are joined to."""
    found: set[str] = set()
    docstrings = docstrings_in(statement)
    values = _with_locals(statement, values)
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if id(node) in docstrings:
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.expr):
            found |= _strings(node, values, [_STEPS])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found.add("/".join(_division_literals(node)))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("join", "joinpath"):
            found.add("/".join(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)))
    return {text for text in found if 0 < len(text) < 4096 and not set(text) & {"\n", "\0"} and not text.startswith("~")}


def run_time_reads(statement: ast.stmt, values: Values) -> Iterator[tuple[int, str]]:
    """(line, what) of every file whose path is not known before the code runs, and of every environment variable."""
    values = _with_locals(statement, values)
    named: set[int] = set()
    for node in ast.walk(statement):  # from the outside in
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and _reads_file(node):
            given = [*([func.value] if isinstance(func, ast.Attribute) else []), *node.args[:1]]
            if not any(len(text) > _MODE_CHARS for part in given for text in _strings(part, values, [_STEPS])):
                yield node.lineno, f"the file that `{ast.unparse(node)[:60]}` reads"
        looked_up = func if func is not None else node.value if isinstance(node, ast.Subscript) else node
        chain = _dotted(looked_up)
        if not isinstance(looked_up, ast.expr) or id(looked_up) in named or not {"environ", "getenv"} & set(chain[-2:]):
            continue
        named |= set(map(id, ast.walk(looked_up)))
        key = node.args[0] if isinstance(node, ast.Call) and node.args else getattr(node, "slice", None)
        name = key.value if isinstance(key, ast.Constant) else None
        yield looked_up.lineno, f"the environment variable {name}" if isinstance(name, str) else "environment variables"


def _reads_file(node: ast.Call) -> bool:
    *owner, name = _dotted(node.func) or ("",)
    return name in _READERS or (name == "load" and owner in (["torch"], ["np"], ["numpy"], ["joblib"]))


def _dotted(node: ast.AST) -> tuple[str, ...]:
    """`a.b.c` as its parts; of `f(x).c` only what is behind the call."""
    if isinstance(node, ast.Attribute):
        return (*_dotted(node.value), node.attr)
    return (node.id,) if isinstance(node, ast.Name) else ()


def _with_locals(statement: ast.stmt, values: Values) -> Values:
    """The names that are assigned inside of the statement, in functions and class bodies, before those of its module."""
    inside: dict[str, list[ast.expr]] = {}
    for node in ast.walk(statement) if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else ():
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
            inside.setdefault(name, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            inside.setdefault(node.target.id, []).append(node.value)

    def known(name: str) -> list[tuple[ast.expr, Values]]:
        return [(value, known) for value in inside.get(name, ())] or values(name)

    return known


def _strings(node: ast.expr | None, values: Values, left: list[int]) -> set[str]:
    """The strings and paths that an expression may give; empty where that is not known."""
    left[0] -= 1
    if node is None or left[0] < 0:
        return set()
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.Name):
        return {text for value, scope in values(node.id)[:_MOST] for text in _strings(value, scope, left)}
    if isinstance(node, ast.Attribute):
        if node.attr == "parent":
            return set(map(posixpath.dirname, _strings(node.value, values, left)))
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            return {text for value, scope in values(node.attr)[:_MOST] for text in _strings(value, scope, left)}
        return set()
    if isinstance(node, ast.JoinedStr):
        return _all(lambda parts: "".join(parts), [_part(part) for part in node.values], values, left)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _all(posixpath.join, [node.left, node.right], values, left, spread=True)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _all("".join, [node.left, node.right], values, left)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
        above = node.slice.value if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int) else -1
        found = _strings(node.value.value, values, left) if above >= 0 else set()
        return {_above(text, above + 1) for text in found}
    return _of_call(node, values, left) if isinstance(node, ast.Call) else set()


def _of_call(node: ast.Call, values: Values, left: list[int]) -> set[str]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    if name == "dirname" and node.args:
        return set(map(posixpath.dirname, _strings(node.args[0], values, left)))
    if name == "joinpath":
        return _all(posixpath.join, [*receiver, *node.args], values, left, spread=True)
    if name == "with_name" and node.args:
        both = [*receiver, *node.args]
        return _all(lambda old, new: posixpath.join(posixpath.dirname(old), new), both, values, left, spread=True)
    if (name == "join" or name in _UNCHANGED) and node.args:
        return _all(posixpath.join, node.args, values, left, spread=True)
    return _strings(receiver[0], values, left) if name in _UNCHANGED and receiver else set()


def _all(join: Callable[..., str], parts: list[ast.expr], values: Values, left: list[int], *, spread: bool = False) -> set[str]:
    """`join` of every way to choose a value for each part; empty if one of them is not known."""
    known = [sorted(_strings(part, values, left))[:_MOST] for part in parts]
    if not all(known) or len(known) > _MOST:
        return set()
    chosen = list(product(*known))[: _MOST**2] if len(known) < 4 else [tuple(values[0] for values in known)]
    return {os.path.normpath(join(*each)) if spread else join(each) for each in chosen}


def _part(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.FormattedValue) else node


def _above(path: str, levels: int) -> str:
    for _ in range(levels):
        path = posixpath.dirname(path)
    return path


def _division_literals(node: ast.AST) -> list[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [*_division_literals(node.left), *_division_literals(node.right)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
