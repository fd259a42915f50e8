"""Can every plug-in be deleted? A copy of the tree without one imports and passes the types.

`make test` deletes all of them at once and runs quick tests of the rest; `make drills` deletes each alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.ingest.formats.registry import FORMATS
from penstock.ingest.preprocess.transforms.registry import TRANSFORMS
from penstock.training.callbacks.registry import CALLBACKS
from penstock.training.frameworks.registry import FRAMEWORKS
from penstock.training.registry.registry import REGISTRIES
from penstock.training.tracking.registry import TRACKERS
from tests import ROOT
from tests.test_imports_point_one_way import BUILT_ON, MODULES, PLUGINS, imported_modules, plugin_of

QUICK = ("tests/flows/test_cli.py", "tests/flows/test_spec_file.py")
"""Tests of the core that no plug-in is needed for, and that look for plug-ins."""

NOT_EDITABLE = (
    "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'Editable' not in getattr(each, '__name__', '')]"
)
"""The finder of an editable installation would find what was deleted in the tree that it was installed from."""

IMPORTER = """
import importlib, json, os, sys, threading
import pytest

def load(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name.startswith("penstock"):  # a library of a plug-in need not be installed
                raise

load(sys.argv[1:])
assert threading.active_count() == 1 and "penstock" not in sys.modules
for line in sys.stdin:
    if not os.fork():
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        modules, tests = json.loads(line)
        chosen = ["-m", "not drill", "-k", "not std and not stream and not takes_this_folder"]
        failed = tests and pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *chosen, *tests])
        load(modules)
        print(len(modules), "modules, of", sys.modules["penstock"].__file__, flush=True)
        os._exit(failed or 0)
    print("exit code", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""Imports libraries, which takes seconds; then, for each line of its input, runs tests and imports modules in a fork of itself.
How the command treats its streams takes a process a test, and nothing of it is a plug-in's; a test below checks a project."""

LIBRARIES = sorted(
    {
        name
        for path in MODULES
        if plugin_of(path) is None
        for _, name in imported_modules((ROOT / path).read_text())
        if not name.startswith("penstock")
    }
)
"""What modules of the core import; what plug-ins import may look at settings that they make first."""


def places_of(plugin: str) -> list[str]:
    """Return the folders of a plug-in, those of their tests, and the file that tests a whole run of it."""
    return [place for at in PLUGINS[plugin] for place in (at, f"tests/{at}")] + [f"tests/runs/test_{plugin}.py"]


def copy_without(plugins: list[str], folder: Path) -> Path:
    """Copy the files that git knows, but for the folders of plug-ins and their tests."""
    gone = [Path(place) for plugin in plugins for place in places_of(plugin)]
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in (name for name in names if name and os.path.lexists(ROOT / name)):
        if not any(Path(name).is_relative_to(place) for place in gone):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(NOT_EDITABLE)
    return folder


def environment_of(tree: Path) -> dict[str, str]:
    """Return the environment of a process that finds the copy's packages."""
    return {**os.environ, "PYTHONPATH": f"{tree}:{tree}/site", "PYTHONDONTWRITEBYTECODE": ""}


def python(tree: Path, *words: str, code: int = 0, **environment: str) -> str:
    """Run Python with the copy's packages, and return what it prints."""
    env = environment_of(tree) | environment
    done = subprocess.run([sys.executable, *words], cwd=tree, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


class Importer:
    """A process that has imported the libraries, for checks of the copy in `tree`."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self._process = subprocess.Popen(
            [sys.executable, "-c", IMPORTER, *LIBRARIES],
            cwd=tree,
            env=environment_of(tree),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def check(self, plugins: list[str], *tests: str) -> None:
        """Run tests, and import each module that is left without `plugins`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        left = [dotted for path, dotted in MODULES.items() if plugin_of(path) not in plugins]
        self._process.stdin.write(json.dumps([left, tests]) + "\n")
        self._process.stdin.flush()
        printed = ""
        while not (line := self._process.stdout.readline()).startswith("exit code "):
            printed += line
            assert line, printed[-8000:]
        assert line == "exit code 0\n", printed[-8000:]
        assert f"{len(left)} modules, of {self.tree}/penstock/__init__.py\n" in printed

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without any plug-in."""
    return copy_without([*PLUGINS], tmp_path_factory.mktemp("core"))


def test_every_folder_of_the_table_is_there() -> None:
    assert [at for folders in PLUGINS.values() for at in folders if not (ROOT / at / "__init__.py").is_file()] == []


def test_every_place_that_the_core_names_is_there() -> None:
    """A place that is written wrongly would look like a plug-in that was deleted."""
    for registry in (FORMATS, TRANSFORMS, FRAMEWORKS, TRACKERS, REGISTRIES, CALLBACKS):
        assert registry._own == registry._places
    named = {place for path in MODULES for place in re.findall(r'"(penstock\.[\w.]+):(\w+)"', (ROOT / path).read_text())}
    assert len(named) > 20
    for module, attribute in sorted(named):
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, module
        defined = rf"^(def|class) {attribute}\b|^{attribute}\b.*="
        assert re.search(defined, Path(spec.origin).read_text(), re.MULTILINE), f"{module}:{attribute}"


@pytest.mark.drill
def test_core_alone_imports_and_passes_quick_tests(core: Path) -> None:
    importer = Importer(core)
    importer.check([*PLUGINS], *QUICK)
    importer.end()


def test_core_alone_lists_its_own_verbs(core: Path) -> None:
    verbs = {name for name in re.findall(r"^\W+(\w+)  ", python(core, "-m", "penstock", "--help", COLUMNS="200"), re.MULTILINE)}
    assert {"run", "check", "plan", "status", "rollback", "ui"} <= verbs
    assert not verbs & {"probe", "tune", "predict", "deploy", "clean", "log", "compare", "report", "rows", "export"}


@pytest.fixture(scope="module")
def project(core: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A project of the tabular template, made by the core."""
    folder = str(tmp_path_factory.mktemp("projects") / "tabular")
    python(core, "-m", "penstock", "init", folder)
    return folder


def test_core_alone_checks_the_tabular_template(core: Path, project: str) -> None:
    printed = python(core, "-m", "penstock", "check", project, "--json")
    assert json.loads(printed.splitlines()[0])["status"] == "done"


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("plan", "--set", "tune={space: {train.epochs: {choice: [1, 2]}}}"), 2, "tune: unknown key"),
        (("plan", "--set", "train.framework=xgboost"), 2, "no training framework 'xgboost'"),
        (
            ("plan", "--set", "register.promote={metric: test/f1}"),
            2,
            "register.promote: it needs the plug-in penstock.tasks.promote",
        ),
    ],
)
def test_what_needs_a_deleted_plug_in_is_refused(
    core: Path, project: str, words: tuple[str, ...], code: int, problem: str
) -> None:
    assert problem in python(core, "-m", "penstock", *words[:1], project, *words[1:], code=code)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, of which each drill deletes one plug-in: at one path, modules are compiled and checked once."""
    copy = copy_without([], tmp_path_factory.mktemp("copies") / "tree")
    if (checked := ROOT / ".mypy_cache").is_dir():
        shutil.copytree(checked, copy / ".mypy_cache")
    return copy


@pytest.fixture(scope="module")
def importer(tree: Path) -> Iterator[Importer]:
    """An importer of that copy."""
    importer = Importer(tree)
    yield importer
    importer.end()


@pytest.mark.drill
@pytest.mark.parametrize("plugin", sorted(PLUGINS))
def test_each_plug_in_can_be_deleted(plugin: str, tree: Path, importer: Importer, tmp_path: Path) -> None:
    deleted = [plugin, *BUILT_ON.get(plugin, ())]
    gone = [tree / place for each in deleted for place in places_of(each) if os.path.lexists(tree / place)]
    for number, place in enumerate(gone):
        place.rename(tmp_path / str(number))
    try:
        with ThreadPoolExecutor() as beside:
            types = beside.submit(python, tree, "-m", "mypy")
            importer.check(deleted)
            types.result()
    finally:
        for number, place in enumerate(gone):
            (tmp_path / str(number)).rename(place)
