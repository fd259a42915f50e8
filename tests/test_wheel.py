"""Does the wheel hold everything, and nothing by accident? It is installed into an empty environment, used from elsewhere."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.shared import FOLDERS, run_outside

pytestmark = pytest.mark.slow


def own_modules() -> set[str]:
    """Every module of this checkout as a wheel holds it; the folders beside `penstock/` are packages of it."""
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if "templates/" not in name:
                found.add(name if folder == "penstock" else f"penstock/{name}")
    return found


def test_the_wheel_has_one_top_level_name_and_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/", 1)[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"penstock"}
    assert own_modules() - names == set(), "a package is missing in pyproject.toml"


def test_the_wheel_holds_every_template_file_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "flows" / "templates").rglob("*") if path.is_file()}
    templates |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "flows" / "history").glob("*.html")}
    templates = {f"penstock/{name}" for name in templates if "__pycache__" not in name}
    assert {"boosted", "images", "lightning", "ray-loop", "tabular", "text"} <= {
        name.split("/")[3] for name in templates if "/templates/" in name
    }
    assert templates <= names
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_packages_import_from_the_wheel_in_another_directory(installed: Path, tmp_path: Path) -> None:
    code = (
        "import json, penstock, penstock.flows.cli as flows, penstock.ingest as ingest;"
        "print(json.dumps({m.__name__: m.__file__ for m in (penstock, flows, ingest)}))"
    )
    places = json.loads(run_outside(installed / "bin" / "python", "-c", code, cwd=tmp_path).splitlines()[-1])
    assert all(Path(place).is_relative_to(installed) for place in places.values()), places


def test_the_command_of_the_wheel_explains_itself_in_another_directory(installed: Path, tmp_path: Path) -> None:
    text = run_outside(installed / "bin" / "penstock", "--help", cwd=tmp_path)
    assert all(verb in text for verb in ("init", "check", "plan", "run", "status"))


def test_the_wheel_makes_a_project_in_another_directory(installed: Path, tmp_path: Path) -> None:
    run_outside(installed / "bin" / "penstock", "init", "mine", "--template", "tabular", cwd=tmp_path)
    assert {"pipeline.yaml", "model.py", "README.md"} <= {path.name for path in (tmp_path / "mine").iterdir()}


def test_the_public_names_are_these_and_cost_no_library_before_they_are_used(installed: Path, tmp_path: Path) -> None:
    code = (
        "import json, sys, penstock\n"
        "heavy = sorted({'torch', 'ray', 'prefect', 'mlflow', 'pyarrow', 'numpy'} & sys.modules.keys())\n"
        "resolved = [name for name in penstock.__all__ if getattr(penstock, name) is not None]\n"
        "print(json.dumps([heavy, penstock.__all__, resolved]))"
    )
    answer = run_outside(installed / "bin" / "python", "-c", code, cwd=tmp_path).splitlines()[-1]
    names = ["FeedDataset", "FeedOptions", "__version__", "errors", "load_model", "load_spec", "log", "open_feed", "run"]
    assert json.loads(answer) == [[], names, names]
