from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.machine.cache_dir import cache_folder
from penstock.machine.empty_database import databases_folder
from penstock.temporary import own_folder, remove_unowned, user_folder
from penstock.usercode.capture import capture
from tests import ROOT

OWNER = """
import sys
from pathlib import Path
from penstock.temporary import own_folder
lock = own_folder(Path(sys.argv[1]), shared=True)
print(flush=True)
sys.stdin.read()
"""


def test_owned_folder_lasts_while_an_owner_lives(tmp_path: Path) -> None:
    folder = tmp_path / "owned"
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with own_folder(folder, shared=True):
            other.kill()
            other.wait()
            remove_unowned([folder])
            assert folder.is_dir()
    remove_unowned([folder, tmp_path / "never there"])
    assert list(tmp_path.iterdir()) == []


def test_folder_that_never_had_owner_stays(tmp_path: Path) -> None:
    remove_unowned([tmp_path])
    assert tmp_path.is_dir()


def test_new_owner_has_whole_folder_during_removal(tmp_path: Path) -> None:
    folder, over = tmp_path / "owned", threading.Event()

    def remove() -> None:
        while not over.is_set():
            remove_unowned([folder])

    removers = [threading.Thread(target=remove) for _ in range(2)]
    for remover in removers:
        remover.start()
    try:
        for number in range(300):
            with own_folder(folder, shared=True):
                (folder / "file").write_text(str(number))
                assert (folder / "file").read_text() == str(number)
    finally:
        over.set()
        for remover in removers:
            remover.join()


def test_unowned_code_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    project = tmp_path / "project"
    project.mkdir()
    old = f"""
from pathlib import Path
from penstock.usercode.capture import capture
capture("m.py:VALUE", Path({str(project)!r})).load()
"""
    (project / "m.py").write_text("VALUE = 'of another process'\n")
    subprocess.run([sys.executable, "-c", old], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, check=True)
    for value in ("one", "two"):
        (project / "m.py").write_text(f"VALUE = {value!r}\n")
        assert capture("m.py:VALUE", project).load() == value
    assert sorted((copy / "m.py").read_text() for copy in user_folder().iterdir()) == ["VALUE = 'one'\n", "VALUE = 'two'\n"]


def test_user_without_home_caches_in_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_uid: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("PENSTOCK_CACHE_DIR", raising=False)
    assert cache_folder() == tmp_path / f"penstock-{os.getuid()}" / "cache" / "shards"
    assert databases_folder() == tmp_path / f"penstock-{os.getuid()}" / "cache" / "databases"
