"""Does the command keep its contract when it is called wrongly: exit codes, one JSON object, words as they were written?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from flows.cli import app


def penstock(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flows", *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("words", [("run", ".", "--until", "nope"), ("run", "--nope"), ("deploy", "."), ("sample",)])
def test_a_wrong_command_line_is_answered_with_json_too(words: tuple[str, ...]) -> None:
    done = penstock(*words, "--json")
    assert done.returncode == 2
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["status"] == "failed" and answer["error"]["kind"] == "UsageError"
    assert penstock(*words).stdout == ""


def test_the_help_says_of_every_file_what_it_may_be_and_what_is_taken_without_it() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    helps = {(name, param.name): param.help for name, command in commands.items() for param in command.params}
    assert not [where for where, text in helps.items() if not text]
    files = {name: text for (name, param), text in helps.items() if param == "file"}
    assert files.keys() == {"check", "plan", "run", "status", "ui", "deploy"}
    assert all("pipeline file, or a folder that holds pipeline.yaml" in text for text in files.values())
    assert all("Without it" in files[name] for name in ("status", "ui"))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(b"\xff\xfe\x00bad")
    done = penstock("check", str(file))
    assert done.returncode == 2
    assert f"{file} is no UTF-8 text" in done.stderr and "Traceback" not in done.stderr


def test_what_user_code_prints_stays_out_of_the_answer(tmp_path: Path) -> None:
    assert penstock("init", str(tmp_path / "p")).returncode == 0
    noise = "import os\nprint('said in Python')\nos.system('echo said by a child')\nclass Robot: print('said in a class')\n"
    (tmp_path / "p" / "noisy.py").write_text(noise)
    done = penstock("check", str(tmp_path / "p"), "--set", "train.recipe=noisy.py:Robot", "--json")
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert "build_model" in json.dumps(json.loads(line)["error"])
    assert {"said in Python", "said by a child", "said in a class"} <= set(done.stderr.splitlines())


def test_names_are_shown_as_they_are_written(tmp_path: Path) -> None:
    assert penstock("init", str(tmp_path / "p")).returncode == 0
    done = penstock("check", str(tmp_path / "p"), "--set", "train.recipe=nope.py:Robot")
    assert done.returncode == 2
    assert "nope.py:Robot" in done.stderr
