"""What is made once for all processes of a test run: a run that nothing disturbs, the wheel, an environment that holds it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.drills.project import make_project
from tests.runs.forked import Command, address_of_prefect_servers
from tests.runs.nights import run_nights

CALM_EPOCHS, CALM_FILES = 5, 2
"""Of the project of `calm`, which has two workers; the weights of another one with the same three are the same."""
FOLDERS = ("penstock", "ingest", "training", "tasks", "flows")
"""Where the code of the package lies in this checkout."""


def common_folder(factory: pytest.TempPathFactory) -> Path:
    """The folder of this test run, which all of its processes share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """A folder that all processes of this test run share, and what `make(folder)` returned to the first of them."""
    folder = common_folder(factory) / name
    folder.mkdir(exist_ok=True)
    answer = folder / "made.json"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            answer.write_text(json.dumps(make(folder)))
    return folder, json.loads(answer.read_text())


def run_calm(folder: Path) -> dict[str, Any]:
    return Command(
        "run", str(make_project(folder / "project", epochs=CALM_EPOCHS, files=CALM_FILES, workers=2)), "--json"
    ).finish()


def make_lone(folder: Path) -> Path:
    """The project of `lone`: two epochs of 180 steps."""
    file = make_project(folder, epochs=2, files=4)
    file.write_text(file.read_text().replace("batch_rows: 64", "batch_rows: 8"))
    return file


def run_lone(folder: Path) -> dict[str, Any]:
    return Command("run", str(make_lone(folder / "project")), "--json").finish()


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `penstock run --json` said of `calm_file`."""
    return made_once(tmp_path_factory, "calm", run_calm)[1]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def lone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `penstock run --json` said of a project of `make_lone`, which has one worker."""
    return made_once(tmp_path_factory, "lone", run_lone)[1]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def calm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pipeline file of `calm`."""
    return made_once(tmp_path_factory, "calm", run_calm)[0] / "project" / "pipeline.yaml"


@pytest.fixture(scope="session")
def prefect_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of one Prefect server, for tests that start many commands: as PREFECT_API_URL it spares each its embedded one.

    All processes of a test run have the same one, as those of a project do.
    """
    script = "import sys; from pathlib import Path; from penstock.flows.servers.services import prefect_api\n"
    script += "from tests.runs.forks import fork_servers; fork_servers(sys.argv[2])\n"
    script += "with prefect_api(Path(sys.argv[1])) as service: print(service.api_url, flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(common_folder(tmp_path_factory) / "prefect"), address_of_prefect_servers()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert holder.stdout is not None
    yield holder.stdout.readline().strip()
    holder.communicate()


@pytest.fixture
def shared_prefect(prefect_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lets every command of the test use that server; without it each starts its own, which takes it ten seconds."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_url)
    return prefect_url


@pytest.fixture(scope="session")
def nights(tmp_path_factory: pytest.TempPathFactory, prefect_url: str) -> dict[str, Any]:
    """What `penstock run --json` said of two nights of `nights_file`: `first`, and `second` with a file of flipped labels."""
    return made_once(tmp_path_factory, "nights", partial(run_nights, prefect_url))[1]  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def nights_file(tmp_path_factory: pytest.TempPathFactory, prefect_url: str) -> Path:
    """The pipeline file of `nights`."""
    return made_once(tmp_path_factory, "nights", partial(run_nights, prefect_url))[0] / "project" / "pipeline.yaml"


def run_outside(*command: str | Path, cwd: Path, **more: str) -> str:
    """Run a command without this checkout on any path, with `more` in its environment; returns its standard output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**environment, **more}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(folder: Path) -> str:
    """The wheel, built from a copy of what git would hand over, so that no build folder of an earlier try gets in."""
    source, out = folder / "source", folder / "wheel"
    out.mkdir()
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
    run_outside(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source, cwd=out)
    (built,) = out.glob("penstock-*.whl")
    return str(built)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return Path(made_once(tmp_path_factory, "wheel", build_wheel)[1])


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel; what penstock depends on comes from this one, through a .pth file."""

    def install(folder: Path) -> str:
        venv = folder / "venv"
        run_outside(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
        site = next((venv / "lib").glob("python3*")) / "site-packages"
        pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
        run_outside(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=venv)
        # .pth files inside these folders are not followed, so an editable install of this checkout stays out.
        here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (site / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in sorted(here)))
        # The command of Prefect as pip would have put it there: the same lines, begun by the interpreter of this environment.
        _, lines = (Path(sysconfig.get_path("scripts")) / "prefect").read_text().split("\n", 1)
        script = venv / "bin" / "prefect"
        script.write_text(f"#!{venv}/bin/python\n{lines}")
        script.chmod(0o755)
        return str(venv)

    return Path(made_once(tmp_path_factory, "installed", install)[1])
