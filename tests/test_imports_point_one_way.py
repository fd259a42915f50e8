"""Do imports point one way, `flows -> tasks -> training -> ingest -> penstock`, and does each big library stay in its room?

The rules are a table; the checker reads the syntax tree of every module, so an import inside a function or under TYPE_CHECKING
counts like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

ORDER = ("penstock", "ingest", "training", "tasks", "flows")
"""Lowest first: a package may import itself and the ones before it."""

ROOMS: dict[str, tuple[str, ...]] = {
    "prefect": ("flows/", "tasks/"),
    "prefect_ray": ("flows/", "tasks/"),
    "mlflow": ("training/mlflow_backend.py", "training/register.py", "training/serving.py"),
    "typer": ("flows/",),
}
"""Library -> the files (or folders, with a slash) that may import it."""

IMPORTERS = ("importlib.import_module", "import_module", "__import__")
"""Functions that import the module named by their first argument."""


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import; relative ones stay inside their package and are left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS:
            yield from ((node.lineno, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def violations(path: str, source: str) -> list[str]:
    """Every import in the module at `path` (relative to the root, posix) that the tables forbid."""
    package = path.split("/", 1)[0]
    found = []
    for line, module in imported_modules(source):
        top = module.split(".", 1)[0]
        if top in ORDER and ORDER.index(top) > ORDER.index(package):
            found.append(f"{path}:{line} imports {module}: {package} is below {top}")
        rooms = ROOMS.get(top)
        if rooms and not any(path == room or (room.endswith("/") and path.startswith(room)) for room in rooms):
            found.append(f"{path}:{line} imports {module}, which belongs in {', '.join(rooms)} only")
        if top == "tests":
            found.append(f"{path}:{line} imports {module}: a package never needs the tests")
    return found


def own_modules() -> list[str]:
    """Every module of the five packages, relative to the root; project templates are user code and follow no rule of ours."""
    paths = (path for package in ORDER for path in sorted((ROOT / package).rglob("*.py")))
    return [name for path in paths if not (name := path.relative_to(ROOT).as_posix()).startswith("flows/templates/")]


def test_every_package_has_modules_to_check() -> None:
    assert {path.split("/", 1)[0] for path in own_modules()} == set(ORDER)


def test_no_module_imports_upwards_or_takes_a_library_out_of_its_room() -> None:
    found = [problem for path in own_modules() for problem in violations(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "word"),
    [
        ("penstock/storage.py", "import ingest.spec", "penstock is below ingest"),
        ("ingest/feed.py", "def late():\n    from training import spec", "ingest is below training"),
        ("training/loop.py", "from tasks.train import stage", "training is below tasks"),
        ("tasks/train.py", "import flows", "tasks is below flows"),
        ("training/loop.py", "import mlflow", "training/mlflow_backend.py"),
        ("training/loop.py", "import prefect.artifacts", "flows/, tasks/"),
        ("ingest/deep/er.py", "if True:\n    from prefect import task", "flows/, tasks/"),
        ("flows/cli.py", "from mlflow import MlflowClient", "training/mlflow_backend.py"),
        ("ingest/feed.py", "import importlib\nimportlib.import_module('training.loop')", "ingest is below training"),
        ("flows/cli.py", "from tests.conftest import ROOT", "never needs the tests"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str, word: str) -> None:
    (problem,) = violations(path, source)
    assert word in problem


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("flows/cli.py", "import prefect, typer\nfrom training.spec import TrainSpec"),
        ("training/mlflow_backend.py", "import mlflow.pytorch"),
        ("training/loop.py", "from ingest.feed import Feed\nfrom .spec import TrainSpec"),
        ("ingest/steps.py", "import trainingwheels, prefectly"),
    ],
)
def test_an_allowed_import_is_let_through(path: str, source: str) -> None:
    assert violations(path, source) == []
