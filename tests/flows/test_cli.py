"""Does the command keep its contract when it is called wrongly: exit codes, one JSON object, words as they were written?"""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from penstock.errors import PreflightError
from penstock.flows.answer import reporting_machine_errors
from penstock.flows.cli import app
from penstock.flows.verbs.init import create_project
from tests import ROOT
from tests.drills.project import make_project

VERBS = {*get_command(app).commands}  # type: ignore[attr-defined]

FROM_SOURCE = {**os.environ, "PYTHONPATH": str(ROOT)}


def penstock(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "penstock", *words], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("words", [("run", ".", "--until", "nope"), ("run", "--nope"), ("rollback",), ("sample",)])
def test_wrong_command_line_prints_json(words: tuple[str, ...]) -> None:
    done = penstock(*words, "--json")
    assert done.returncode == 2
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["status"] == "failed" and answer["error"]["kind"] == "UsageError"
    assert penstock(*words).stdout == ""


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "make room (df -h shows the full disk)"),
        (errno.EROFS, "make it readable and writable"),
        (errno.ESTALE, "check the disk or the mount it lies on"),
        (errno.EMFILE, "allow more open files (ulimit -n)"),
    ],
    ids=["full", "read-only", "server gone", "files"],
)
def test_os_error_gives_advice(code: int, advice: str) -> None:
    with pytest.raises(PreflightError, match="/the/file: ") as told, reporting_machine_errors():
        raise OSError(code, os.strerror(code), "/the/file")
    assert told.value.next_step == f"{advice}, and run the same command again"


def test_help_of_file_arguments_names_kind_and_default() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    helps = {(name, param.name): param.help for name, command in commands.items() for param in command.params}
    assert not [where for where, text in helps.items() if not text]
    files = {name: text for (name, param), text in helps.items() if param == "file"}
    of_plugins = {"probe", "tune", "predict", "log", "compare", "rows", "report", "export", "clean", "deploy"}
    assert files.keys() - of_plugins == {"check", "plan", "run", "status", "rollback", "ui"}
    assert all("pipeline file, or a folder that holds pipeline.yaml" in text for text in files.values())
    needed = {name for name, command in commands.items() for param in command.params if param.name == "file" and param.required}
    assert not needed
    assert all("Without it" in files[name] for name in ("status", "ui"))


def test_binary_pipeline_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(b"\xff\xfe\x00bad")
    done = penstock("check", str(file))
    assert done.returncode == 2
    assert f"{file} is not UTF-8 text" in done.stderr and "Traceback" not in done.stderr


def test_output_of_user_code_goes_to_stderr(tmp_path: Path) -> None:
    create_project(tmp_path / "p", "tabular")
    noise = "import os\nprint('said in Python')\nos.system('echo said by a child')\nclass Robot: print('said in a class')\n"
    (tmp_path / "p" / "noisy.py").write_text(noise)
    done = penstock("check", str(tmp_path / "p"), "--set", "train.recipe=noisy.py:Robot", "--json")
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert "build_model" in json.dumps(json.loads(line)["error"])
    assert {"recipe: said in Python", "said by a child", "recipe: said in a class"} <= set(done.stderr.splitlines())


def test_brackets_in_names_are_printed(tmp_path: Path) -> None:
    create_project(tmp_path / "p", "tabular")
    told = CliRunner().invoke(app, ["check", str(tmp_path / "p"), "--set", "train.recipe=nope.py:Robot"])
    assert told.exit_code == 2
    assert "nope.py:Robot" in told.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_stream_does_not_fail(tmp_path: Path, closed: str) -> None:
    (tmp_path / ".penstock").mkdir()
    command = f"{shlex.quote(sys.executable)} -m penstock status --json {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=FROM_SOURCE, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, f"no runs in {tmp_path}/.penstock\n" if "2>" not in closed else "")
    assert done.stdout == "" if ">&-" in closed.split() else json.loads(done.stdout)["status"] == "done"


def test_closed_stdout_does_not_stop_the_work(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "penstock", "init", "p"]
    done = subprocess.run(command, cwd=tmp_path, env=FROM_SOURCE, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "p" / "pipeline.yaml").exists()


def test_unwritable_stdout_is_reported(tmp_path: Path) -> None:
    (tmp_path / ".penstock").mkdir()
    command = f"{shlex.quote(sys.executable)} -m penstock status --json > /dev/full"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=FROM_SOURCE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3
    assert done.stderr.endswith("penstock: the answer cannot be written to stdout: No space left on device\n")


def test_answer_is_on_stdout(tmp_path: Path) -> None:
    (tmp_path / ".penstock").mkdir()
    command = [sys.executable, "-m", "penstock", "status"]
    done = subprocess.run(command, cwd=tmp_path, env=FROM_SOURCE, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == (f"no runs in {tmp_path}/.penstock\n", "")


def test_warnings_as_errors_are_left_out(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['penstock', '--help']; import penstock.flows.cli as cli; cli.main()"
    command, environment = [sys.executable, "-c", code], {**FROM_SOURCE, "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "penstock: PYTHONWARNINGS is left out, since libraries warn\n")


def test_unwritable_or_deleted_folder_is_named(tmp_path: Path) -> None:
    done = penstock("init", "/proc/here")  # nobody may make anything there
    assert done.returncode == 3 and "/proc/here cannot be made" in done.stderr and "Traceback" not in done.stderr
    gone = f"cd {tmp_path} && mkdir gone && cd gone && rmdir ../gone && {shlex.quote(sys.executable)} -m penstock status"
    done = subprocess.run(["sh", "-c", gone], env=FROM_SOURCE, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (3, "penstock: the current folder has been deleted; go to one that exists\n")


@pytest.mark.parametrize("below", ["", "/below"])
@pytest.mark.parametrize("verb", ["check", "plan", "run", "status", *sorted({"log", "clean"} & VERBS)])
def test_storage_that_is_a_file_is_refused(tmp_path: Path, verb: str, below: str) -> None:
    (tmp_path / "file").write_text("")
    file = make_project(tmp_path / "p", files=1)
    file.write_text(f"{file.read_text()}storage: {tmp_path}/file{below}\n")
    told = CliRunner().invoke(app, [verb, str(file)])
    assert told.exit_code == 3, told.output
    assert told.stderr == (
        f"penstock: storage {tmp_path}/file{below}: {tmp_path}/file is a file, and a storage is a folder, or a URL such as "
        "s3://bucket/prefix\nNext: name a folder as `storage`, or move the file away, and run the same command again\n"
    )


ADDRESS = "http://127.0.0.1:5000/#/experiments/1234567890/runs/0123456789abcdef0123456789abcdef?workflowType=machine_learning"


FOLDER = "a-folder-of-a-name-that-is-too-long-for-a-line"


@pytest.mark.parametrize(("url", "page"), [(ADDRESS, ADDRESS), (None, f"penstock ui {FOLDER}")])
def test_page_address_is_last_line_and_uncut(monkeypatch: pytest.MonkeyPatch, url: str | None, page: str) -> None:
    def done(*_arguments: Any, **_options: Any) -> dict[str, Any]:
        return {"status": "done", "url": url}

    monkeypatch.setattr("penstock.flows.verbs.run.run_loaded", done)
    monkeypatch.setattr("penstock.flows.cli._read_spec", lambda *_: None)
    told = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["run", FOLDER])
    assert told.exit_code == 0 and f"see it: {page}\n" in told.output


@pytest.mark.parametrize(
    ("verb", "code", "says"), [("plan", 0, "new run"), ("check", 0, "one batch  ok"), ("run", 2, "column 'nothing'")]
)
def test_command_without_file_takes_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, code: int, says: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(make_project(tmp_path / "p", files=1).parent)
    wrong = ["--set", "preprocess=[]", "--set", "data.label=nothing"] if verb == "run" else []
    told = CliRunner().invoke(app, [verb, *wrong])
    assert told.exit_code == code and says in told.output
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, [verb]).exit_code == 2, "there is none"
