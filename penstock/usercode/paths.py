"""Which files and environment variables may a piece of user code read, as far as reading it can tell?

Paths are put together as the code would do it: from literals, from `__file__`, and from names that are assigned once or more
(`ASSETS = Path(__file__).parent / "assets"`). What a path is made of at run time, nobody can know; such places are named.
"""

from __future__ import annotations

import ast
import os.path
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from penstock.usercode.syntax import docstrings_in

__all__ = ["Paths", "Values", "paths_in", "run_time_reads"]

Values = Callable[[str], "list[tuple[ast.expr, Values]]"]
"""What a name may mean: expressions that are assigned to it, each with the meaning of the names in it."""

_MOST = 16
"""Values followed of one name or expression."""

_STEPS = 200
"""Looked at for one expression: code may assign a name from itself."""

_UNCHANGED = frozenset(
    {"Path", "PurePath", "PosixPath", "str", "fspath", "resolve", "absolute", "abspath", "realpath", "normpath"}
)

_BUILDERS = _UNCHANGED | {"join", "joinpath", "with_name", "dirname"}

_WRITING = re.compile("[wax][bt]?|[bt][wax]")
"""Modes of `open` that read nothing."""

_WRITERS = frozenset(
    {
        *("write_text", "write_bytes", "touch", "unlink", "remove", "FileHandler", "RotatingFileHandler", "basicConfig"),
        *("save", "savez", "savez_compressed", "savetxt", "save_file", "save_model", "dump", "write_table", "write_csv"),
        *("to_csv", "to_json", "to_parquet", "to_pickle", "to_feather", "to_excel", "to_html"),
        *("savefig", "imsave", "imwrite", "write_image", "write_html", "write_png", "write_jpeg"),
    }
)
"""Functions and methods, by their last name, to which a path is where they write."""

_LOOKS = frozenset({"exists", "lexists", "isfile", "is_file"})
"""That ask whether a file is there."""

_MODE_CHARS = 3
"""`path.open("rb")`: so short a string is no path."""

_READERS = frozenset({"open", "read_text", "read_bytes", "read_csv", "read_parquet", "read_json", "loadtxt", "load_file"})


class Paths(NamedTuple):
    """Every string in a piece of code that may name a file: literals, and what they are joined to."""

    named: set[str]
    """Read, or handed on to what may read it."""
    mentioned: set[str]
    """Assigned to a name, whose uses count by themselves, or asked whether it is there."""
    written: set[str]
    """Written from scratch or appended to: what was in it before goes nowhere."""


def paths_in(statement: ast.stmt, values: Values) -> Paths:
    """What of the statement may name a file, by what is done with it."""
    found = Paths(set(), set(), set())
    docstrings = docstrings_in(statement)
    values = _with_locals(statement, values)
    roles: dict[int, set[str]] = {}
    waiting: list[tuple[ast.AST, set[str]]] = [(statement, found.named)]
    while waiting:  # from the outside in
        node, into = waiting.pop()
        if id(node) in docstrings:
            continue
        roles |= {id(path): texts for path, texts in _roles(node, found)}
        waiting.extend((child, roles.get(id(child), into)) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store):
            into |= _strings(node, values, [_STEPS])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            into.add("/".join(_division_literals(node)))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("join", "joinpath"):
            into.add("/".join(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)))
    return Paths(*(set(filter(_may_be_path, texts)) for texts in found))


def _may_be_path(text: str) -> bool:
    return 0 < len(text) < 4096 and not set(text) & {"\n", "\0"} and not text.startswith("~")


def _roles(node: ast.AST, found: Paths) -> Iterator[tuple[ast.expr, set[str]]]:
    """The paths in a node that it does not read, each with where it goes. The node reads, or hands on, what is not here."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        given: Sequence[ast.expr | None] = [node.value]
        into = found.mentioned
    elif isinstance(node, ast.Call):
        *_, name = _dotted(node.func) or ("",)
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        receiver = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        if name == "open":
            mode = next((keyword.value for keyword in node.keywords if keyword.arg == "mode"), None)
            if receiver and not (node.args and _mode(node.args[0]) is None):  # `path.open("w")`
                given, mode = receiver, mode or next(iter(node.args), None)
            else:
                named = [keyword.value for keyword in node.keywords if keyword.arg == "file"]
                given, mode = node.args[:1] or named, mode or next(iter(node.args[1:]), None)
            modes = [mode.body, mode.orelse] if isinstance(mode, ast.IfExp) else [mode]
            if not all(_WRITING.fullmatch(_mode(each) or "r") for each in modes):
                return
        elif name in _WRITERS | _LOOKS:
            given = [*receiver, *given]
        else:
            return
        into = found.mentioned if name in _LOOKS else found.written
    else:
        return
    yield from ((path, into) for path in given if path is not None and _is_path(path))


def _mode(node: ast.expr | None) -> str | None:
    """A short string, such as `open` takes to know what is to be done; None of everything else."""
    text = node.value if isinstance(node, ast.Constant) else None
    return text if isinstance(text, str) and 0 < len(text) <= _MODE_CHARS else None


def _is_path(node: ast.expr) -> bool:
    """Whether an expression does nothing but put a path together."""
    if isinstance(node, ast.Name | ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return True
    if isinstance(node, ast.Attribute):
        return _is_path(node.value)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div | ast.Add) and _is_path(node.left) and _is_path(node.right)
    if not isinstance(node, ast.Call):
        return False
    *_, name = _dotted(node.func) or ("",)
    return name in _BUILDERS and all(map(_is_path, node.args)) and (isinstance(node.func, ast.Name) or _is_path(node.func))


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
