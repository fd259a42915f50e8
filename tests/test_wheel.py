"""Does the wheel hold everything, and nothing by accident? It is installed into an empty environment, used from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

FOLDERS = ("penstock", "ingest", "training", "tasks", "flows")

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without this checkout on any path; returns its standard output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git would hand over, so that no build folder of an earlier try gets in."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    if not names:  # an unpacked archive has no git; then everything that a build needs is what lies here
        names = [path.relative_to(ROOT).as_posix() for part in FOLDERS for path in (ROOT / part).rglob("*") if path.is_file()]
        names += ["pyproject.toml", "README.md", "LICENSE"]
    for name in names:
        if (ROOT / name).exists() and "__pycache__" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=out)
    (built,) = out.glob("penstock-*.whl")
    return built


def own_modules() -> set[str]:
    """Every module of this checkout as a wheel holds it; the folders beside `penstock/` are packages of it."""
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if "templates/" not in name:
                found.add(name if folder == "penstock" else f"penstock/{name}")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment that holds the wheel; what penstock depends on comes from this one, through a .pth file."""
    venv = tmp_path_factory.mktemp("empty") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path_factory.getbasetemp())
    site = next((venv / "lib").glob("python3*")) / "site-packages"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        venv / "bin" / "python",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=venv,
    )
    # .pth files inside these folders are not followed, so an editable install of this checkout stays out.
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in sorted(here)))
    return venv


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
    templates = {f"penstock/{name}" for name in templates if "__pycache__" not in name}
    assert {"images", "tabular", "text"} <= {name.split("/")[3] for name in templates}
    assert templates <= names
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_packages_import_from_the_wheel_in_another_directory(installed: Path, tmp_path: Path) -> None:
    code = (
        "import json, penstock, penstock.flows.cli as flows, penstock.ingest as ingest;"
        "print(json.dumps({m.__name__: m.__file__ for m in (penstock, flows, ingest)}))"
    )
    places = json.loads(run(installed / "bin" / "python", "-c", code, cwd=tmp_path).splitlines()[-1])
    assert all(Path(place).is_relative_to(installed) for place in places.values()), places


def test_the_command_of_the_wheel_explains_itself_in_another_directory(installed: Path, tmp_path: Path) -> None:
    text = run(installed / "bin" / "penstock", "--help", cwd=tmp_path)
    assert all(verb in text for verb in ("init", "check", "plan", "run", "status"))


def test_the_wheel_makes_a_project_in_another_directory(installed: Path, tmp_path: Path) -> None:
    run(installed / "bin" / "penstock", "init", "mine", "--template", "tabular", cwd=tmp_path)
    assert {"pipeline.yaml", "model.py", "README.md"} <= {path.name for path in (tmp_path / "mine").iterdir()}
