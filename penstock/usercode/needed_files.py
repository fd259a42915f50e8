"""Which of the captured data files does a part of the code need? A registered model keeps no file that only training reads.

The code is read as `closure` reads it, with the bodies of some methods left out. What runs on import always counts, and so does
a method that anything else mentions by name, of whichever class: too many files may be kept, never too few.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Collection, Iterable, Iterator

from penstock.usercode.capture import UserCode
from penstock.usercode.closure import Closure
from penstock.usercode.module import Module
from penstock.usercode.package import Package
from penstock.usercode.syntax import DEFINITIONS

__all__ = ["without_data", "without_files_of"]


def without_data(code: UserCode) -> UserCode:
    """The same code without any data file but those that params name."""
    return _keeping(code, ())


def without_files_of(code: UserCode, methods: Collection[str]) -> UserCode:
    """The same code without the data files that nothing but `methods` of the target's class reach, and what only they call.

    Python files stay, since importing the target runs them. The digest stays, too: it tells what was trained.

    Args:
        methods: that are never called where the code goes, unless other code there mentions them.
    """
    if not any(_is_data(path) for path in code.files):
        return code
    module, _, name = code.target.partition(":")
    parts = _Parts(code, module, name)
    left_out = parts.left_out(set(methods))
    while True:
        reached = _Reading(Package.of(code.files, code.origin), module, name, parts.classes, left_out)
        if reached.by_run_time_name:
            return code
        called = left_out & reached.mentioned
        if not called:
            return _keeping(code, reached.data)
        left_out -= called


def _keeping(code: UserCode, data: Collection[str]) -> UserCode:
    kept = {*data, *code.param_files.values()}
    return code.model_copy(update={"files": {p: text for p, text in code.files.items() if not _is_data(p) or p in kept}})


def _is_data(path: str) -> bool:
    return not path.endswith(".py")


class _Parts:
    """The class that a target names with its bases in the project; none where reading cannot tell."""

    def __init__(self, code: UserCode, path: str, name: str) -> None:
        closure = Closure(Package.of(code.files, code.origin).folder, path, name)
        self.classes: dict[tuple[str, int], ast.ClassDef] = {}
        """By file and line."""
        self._has_other_bases = False
        waiting: list[tuple[ast.expr, Module]] = [(ast.Name(name), closure.module(path))]
        while waiting:
            expression, module = waiting.pop()
            found = closure.class_of(expression, module)
            if found is None:
                self._has_other_bases = True
            elif (place := (found[1].path, found[0].lineno)) not in self.classes:
                self.classes[place] = found[0]
                waiting += [(base, found[1]) for base in found[0].bases if ast.unparse(base) != "object"]

    def left_out(self, methods: set[str]) -> set[str]:
        """`methods`, and others that these mention. A base from elsewhere may call any other, so there are none then."""
        own = {
            m.name: m
            for each in self.classes.values()
            for m in each.body
            if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        found = methods & own.keys()
        waiting = [] if self._has_other_bases else [*found]
        while waiting:
            more = {name for name in _mentioned(own[waiting.pop()]) if name in own and not name.startswith("__")} - found
            found |= more
            waiting += more
        return found


class _Reading(Closure):
    """What is reached without the bodies of some methods."""

    def __init__(self, package: Package, path: str, name: str, places: Collection[tuple[str, int]], left_out: set[str]) -> None:
        self._places = places
        self._left_out = left_out
        self._imported: set[str] = set()
        self.mentioned: set[str] = set()
        """Every name, attribute and text in what is reached: what may be called."""
        self.by_run_time_name = False
        """Whether an attribute is taken by a name that only a run can tell."""
        super().__init__(package.folder, path, name)

    def _execute(self, path: str) -> None:
        super()._execute(path)
        if path not in self._imported:
            self._imported.add(path)
            for nodes in self.module(path).definitions.values():
                for node in nodes:
                    self._follow(path, _on_import(node))

    def _follow(self, path: str, statement: ast.stmt) -> None:
        if isinstance(statement, ast.ClassDef) and (path, statement.lineno) in self._places:
            statement = copy.copy(statement)
            statement.body = [_on_import(s) if getattr(s, "name", "") in self._left_out else s for s in statement.body]
        self.mentioned |= _mentioned(statement)
        self.by_run_time_name |= any(
            isinstance(node, ast.Call)
            and ast.unparse(node.func)
            in ("getattr", "operator.attrgetter", "attrgetter", "operator.methodcaller", "methodcaller")
            and not any(isinstance(given, ast.Constant) for given in node.args[:2])
            for node in ast.walk(statement)
        )
        super()._follow(path, statement)


def _on_import(statement: ast.stmt) -> ast.stmt:
    """What of a statement runs when its module is imported: of a function its decorators and defaults."""
    if not isinstance(statement, DEFINITIONS):
        return statement
    statement = copy.copy(statement)
    statement.body = [_on_import(s) for s in statement.body] if isinstance(statement, ast.ClassDef) else [ast.Pass()]
    return statement


def _mentioned(statement: ast.AST) -> set[str]:
    return {word for node in ast.walk(statement) for word in _words(node)}


def _words(node: ast.AST) -> Iterable[str]:
    words: Iterator[object] = iter((getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "value", None)))
    return [word for word in words if isinstance(word, str)]
