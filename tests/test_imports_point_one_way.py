"""Do imports go the way of the data, and does each big library stay in its room?

The rules are tables; the checker reads the syntax tree of every module, so an import inside a function or under TYPE_CHECKING
counts like any other. A module's room is the folder it lies in; a few modules at the top of a package are rooms of their own.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest

from tests import ROOT

PACKAGES = ("penstock", "ingest", "training", "tasks", "flows")
"""Folders at the top, lowest first: a package may import itself and the ones before it."""

DOORS = ("penstock/__init__.py", "penstock/__main__.py")
"""May import anything: what users import, and the command."""

_LOW = ("ingest", "ingest/columns")
ROOMS: dict[str, tuple[str, ...]] = {
    "ingest": (),
    "ingest/columns": ("ingest",),
    "ingest/files": ("ingest",),
    "ingest/formats": (*_LOW, "ingest/files"),
    "ingest/read": (*_LOW, "ingest/files", "ingest/formats"),
    "ingest/preprocess": (*_LOW, "ingest/files", "ingest/formats", "ingest/read"),
    "ingest/materialize": (*_LOW, "ingest/files", "ingest/formats", "ingest/read", "ingest/preprocess"),
    "ingest/shuffle": ("ingest",),
    "ingest/feed": (*_LOW, "ingest/files", "ingest/shuffle", "ingest/materialize"),
    "ingest/open_feed.py": (*_LOW, "ingest/files", "ingest/shuffle", "ingest/feed"),
    "training": (),
    "training/checkpoint": ("training",),
    "training/callbacks": ("training",),
    "training/step": ("training", "training/checkpoint", "training/callbacks"),
    "training/evaluation": ("training", "training/checkpoint", "training/callbacks", "training/step"),
    "training/loop": ("training", "training/checkpoint", "training/callbacks", "training/step", "training/evaluation"),
    "training/on_ray": (
        "training",
        "training/checkpoint",
        "training/callbacks",
        "training/step",
        "training/evaluation",
        "training/loop",
    ),
    "training/session": (
        "training",
        "training/checkpoint",
        "training/callbacks",
        "training/step",
        "training/evaluation",
        "training/loop",
        "training/on_ray",
    ),
    "training/frameworks": (
        "training",
        "training/checkpoint",
        "training/callbacks",
        "training/step",
        "training/evaluation",
        "training/loop",
        "training/on_ray",
        "training/session",
    ),
    "training/tracking": ("training", "training/checkpoint"),
    "training/registry": ("training", "training/checkpoint", "training/tracking", "training/evaluation"),
    "training/exporters": ("training",),
    "training/predict": ("training", "training/registry"),
    "tasks/stages.py": (),
    "tasks/prefect_away.py": (),
    "tasks/tune": (),
    "tasks/spec.py": (),
    "tasks/project.py": ("tasks/spec.py",),
    "tasks/records": ("tasks/stages.py", "tasks/project.py"),
    "tasks/retention": ("tasks/records",),
    "tasks/context.py": ("tasks/stages.py", "tasks/project.py", "tasks/records"),
    "tasks/model": ("tasks/context.py", "tasks/records"),
    "tasks/promote": ("tasks/context.py", "tasks/model"),
    "tasks": (
        *("tasks/stages.py", "tasks/prefect_away.py", "tasks/spec.py", "tasks/project.py", "tasks/context.py"),
        *("tasks/records", "tasks/model"),
    ),
    "flows/spec_file.py": (),
    "flows/given": ("flows/spec_file.py",),
    "flows/servers": (),
    "flows/preflight": ("flows/spec_file.py", "flows/servers"),
    "flows/run": ("flows/spec_file.py", "flows/servers", "flows/preflight"),
    "flows/pipeline.py": ("flows/spec_file.py", "flows/servers", "flows/run"),
    "flows/answer.py": (),
    "flows/options.py": (),
    "flows/verbs": (
        *("flows/spec_file.py", "flows/servers", "flows/run", "flows/pipeline.py", "flows/preflight"),
        *("flows/answer.py", "flows/options.py"),
    ),
    "flows/tune": (
        *("flows/spec_file.py", "flows/servers", "flows/preflight", "flows/run", "flows/pipeline.py", "flows/verbs"),
        *("flows/answer.py", "flows/options.py"),
    ),
    "flows/predict": (
        *("flows/spec_file.py", "flows/servers", "flows/preflight", "flows/run", "flows/verbs"),
        *("flows/answer.py", "flows/options.py"),
    ),
    "flows/history": ("flows/answer.py", "flows/options.py", "flows/verbs"),
    "flows/export": ("flows/spec_file.py", "flows/servers", "flows/answer.py", "flows/options.py", "flows/history"),
    "flows/retention": ("flows/answer.py", "flows/options.py", "flows/spec_file.py"),
    "flows/deploy": (
        *("flows/answer.py", "flows/options.py", "flows/spec_file.py", "flows/servers", "flows/run", "flows/pipeline.py"),
    ),
    "flows/cli.py": ("flows/answer.py", "flows/options.py", "flows/spec_file.py", "flows/verbs"),
    "penstock": (),
    "penstock/lease.py": ("penstock", "penstock/machine"),
    "penstock/machine": ("penstock",),
    "penstock/usercode": ("penstock",),
}
"""Room -> the rooms of its package that it may import, besides itself."""

_TABLES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["penstock"]
PLUGINS: dict[str, list[str]] = _TABLES["plugins"]
"""Plug-in -> its folders, which nothing outside of them imports: registries name what is in them (CONTRIBUTING)."""

BUILT_ON: dict[str, list[str]] = _TABLES["built-on"]
"""Plug-in -> those that may import it, and are deleted with it."""

LIBRARIES: dict[str, tuple[str, ...]] = {
    "prefect": ("flows/", "tasks/"),
    "prefect_ray": ("flows/", "tasks/"),
    "mlflow": (*(f"training/tracking/mlflow_{part}.py" for part in ("backend", "tracker", "versions")), "training/registry/"),
    "typer": ("flows/",),
    "torch": (
        *("ingest/columns/images.py", "ingest/shuffle/row_generator.py", "ingest/feed/", "ingest/open_feed.py"),
        *(f"training/{room}/" for room in ("callbacks", "step", "evaluation", "loop", "on_ray", "session", "frameworks")),
        *(f"training/{file}.py" for file in ("determinism", "model", "open_feeds", "ranks", "recipe", "rng")),
        *(f"training/checkpoint/{file}.py" for file in ("exactness", "matching", "packed", "state_files")),
        *("training/registry/loaded_model.py", "tasks/promote/compare.py"),
        *("tasks/evaluate.py", "flows/preflight/checks.py", "flows/tune/flow.py"),
        "flows/verbs/probe/",
    ),
}
"""Library -> the files (or folders, with a slash) that may import it.

A feed gives tensors; weights are tensors. Keys, records, the commit of a checkpoint, tracking and registering know no torch.
"""

IMPORTERS = ("importlib.import_module", "import_module", "__import__")
"""Functions that import the module named by their first argument."""


def own_modules() -> dict[str, str]:
    """Path from the root -> dotted name, of every module; templates of projects are user code and follow no rule of ours."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("flows/templates/"):
                dotted = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                found[name] = dotted if package == "penstock" else f"penstock.{dotted}"
    return found


MODULES = own_modules()
PATHS = {dotted: path for path, dotted in MODULES.items()}


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import; relative ones are a fault of their own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name if name in PATHS else node.module
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORTERS:
            yield from ((node.lineno, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def package_of(path: str) -> str:
    """The top folder of a module's path."""
    return path.split("/", 1)[0]


def room_of(path: str) -> str:
    """`ingest/feed` for ingest/feed/gather.py, `ingest/open_feed.py` where that is a room, else `ingest`."""
    if path in ROOMS:
        return path
    parts = path.split("/")
    return "/".join(parts[: 2 if len(parts) > 2 else 1])


def plugin_of(path: str) -> str | None:
    """The plug-in that a module or folder belongs to; None for the core."""
    return next((name for name, folders in PLUGINS.items() if any(f"{path}/".startswith(f"{at}/") for at in folders)), None)


def crossings(path: str, source: str) -> list[str]:
    """Every import in the module at `path` of a plug-in that it does not belong to."""
    found = []
    for line, module in imported_modules(source):
        plugin = plugin_of(PATHS.get(module, ""))
        if plugin is not None and plugin_of(path) not in (plugin, *BUILT_ON.get(plugin, ())):
            found.append(f"{path}:{line} imports {module} of the plug-in {plugin}: name it in a registry")
    return found


def violations(path: str, source: str) -> list[str]:
    """Every import in the module at `path` (relative to the root, posix) that the tables forbid."""
    if path in DOORS:
        return []
    package, found = package_of(path), []
    for line, module in imported_modules(source):
        top = module.split(".", 1)[0]
        target = PATHS.get(module)
        if module.startswith("."):
            found.append(f"{path}:{line} imports {module}: imports are absolute here")
        elif top in PACKAGES[1:] and top != "penstock":
            found.append(f"{path}:{line} imports {module}: the package is called penstock.{module}")
        elif top == "tests":
            found.append(f"{path}:{line} imports {module}: a package never needs the tests")
        elif target and PACKAGES.index(package_of(target)) > PACKAGES.index(package):
            found.append(f"{path}:{line} imports {module}: {package} is below {package_of(target)}")
        elif target and package_of(target) == package and room_of(path) in ROOMS:
            room, other = room_of(path), room_of(target)
            if other != room and other not in ROOMS[room]:
                found.append(f"{path}:{line} imports {module}: {room} may import {', '.join(ROOMS[room]) or 'itself only'}")
        allowed = LIBRARIES.get(top)
        if allowed and not any(path == room or (room.endswith("/") and path.startswith(room)) for room in allowed):
            found.append(f"{path}:{line} imports {module}, which belongs in {', '.join(allowed)} only")
    return found


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of names that reach each other (Tarjan's strongly connected components of two and more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(arrows.get(name, ())):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(arrows):
        if name not in index:
            visit(name)
    return found


def file_arrows() -> dict[str, set[str]]:
    """Which file imports which; the doors import lazily, and are left out."""
    arrows: dict[str, set[str]] = {}
    for path in MODULES:
        if path not in DOORS:
            targets = {PATHS.get(module, "") for _, module in imported_modules((ROOT / path).read_text())}
            arrows[path] = targets - {"", path, *DOORS}
    return arrows


def test_every_package_has_modules_to_check_and_every_room_exists() -> None:
    assert {package_of(path) for path in MODULES} == set(PACKAGES)
    rooms = {room_of(path) for path in MODULES}
    named = {*ROOMS, *(room for allowed in ROOMS.values() for room in allowed)}
    assert {room for room in named if plugin_of(room) is None} <= rooms


def test_no_module_imports_against_the_tables() -> None:
    found = [problem for path in MODULES for problem in violations(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


def test_only_a_plug_in_imports_itself() -> None:
    assert [problem for path in MODULES for problem in crossings(path, (ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    ("path", "module", "allowed"),
    [
        ("flows/verbs/check.py", "penstock.flows.tune.space", False),
        ("tasks/tune/spec.py", "penstock.flows.verbs.probe.reading", False),
        ("flows/tune/flow.py", "penstock.tasks.tune.record", True),
        ("training/frameworks/xgboost/library.py", "penstock.training.frameworks.boosted.rank", True),
        ("training/frameworks/keras/loop.py", "penstock.training.frameworks.loops.steps", True),
        ("training/frameworks/loops/steps.py", "penstock.training.frameworks.keras.loop", False),
        ("flows/tune/flow.py", "penstock.flows.verbs.run", True),
    ],
)
def test_import_across_the_border_is_found(path: str, module: str, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATHS, module, f"{module.removeprefix('penstock.').replace('.', '/')}.py")
    problems = crossings(path, f"def late():\n    import {module}")
    assert problems == [] if allowed else "name it in a registry" in problems[0]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert cycles(file_arrows()) == []


def test_a_circle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("path", "source", "word"),
    [
        ("penstock/storage.py", "import penstock.ingest.spec", "penstock is below ingest"),
        ("ingest/spec.py", "def late():\n    from penstock.training import spec", "ingest is below training"),
        ("training/spec.py", "from penstock.tasks.train import stage", "training is below tasks"),
        ("tasks/train.py", "import penstock.flows", "tasks is below flows"),
        ("training/spec.py", "import mlflow", "mlflow_backend.py"),
        ("training/spec.py", "import prefect.artifacts", "flows/, tasks/"),
        ("ingest/deep/er.py", "if True:\n    from prefect import task", "flows/, tasks/"),
        ("flows/cli.py", "from mlflow import MlflowClient", "mlflow_backend.py"),
        ("tasks/records/keys.py", "from penstock.tasks.context import RunContext", "tasks/records may import"),
        ("training/checkpoint/store.py", "import torch", "training/checkpoint/state_files.py"),
        ("ingest/spec.py", "import importlib\nimportlib.import_module('penstock.training.spec')", "ingest is below training"),
        ("flows/cli.py", "from tests.conftest import ROOT", "never needs the tests"),
        ("flows/cli.py", "from .pipeline import pipeline", "imports are absolute"),
        ("flows/cli.py", "from tasks.train import train", "penstock.tasks.train"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str, word: str) -> None:
    (problem,) = violations(path, source)
    assert word in problem


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("flows/cli.py", "import prefect, typer\nfrom penstock.training.spec import TrainSpec"),
        ("training/spec.py", "from penstock.ingest.spec import DataSpec"),
        ("ingest/spec.py", "import trainingwheels, prefectly"),
    ],
)
def test_an_allowed_import_is_let_through(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_every_room_says_its_question_and_its_public_modules() -> None:
    for path in (path for path in MODULES if path.endswith("/__init__.py") and path not in DOORS):
        source = (ROOT / path).read_text()
        said = ast.get_docstring(ast.parse(source)) or ""
        assert "?" in said.splitlines()[0], f"{path}: which question does the room answer?"
        public = said.partition("Public:")[2]
        named = [name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", public)]
        here = {file.stem if file.is_file() else file.name for file in (ROOT / path).parent.iterdir()}
        exported = {name for name in named if f'"{name}"' in source.partition("__all__")[2]}
        assert set(named) & here or exported or "module" in public, f"{path}: which modules are for others?"


def test_the_tests_of_a_room_lie_in_a_folder_of_its_name() -> None:
    rooms = [path.rpartition("/")[0] for path in MODULES if path.endswith("/__init__.py") and path.count("/") == 2]
    assert rooms and [room for room in rooms if not any((ROOT / "tests" / room).glob("test_*.py"))] == []
