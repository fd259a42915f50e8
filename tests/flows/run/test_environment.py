"""The commit of a run is on record, and whether files differ from it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock.flows.run.open_attempt import git_commit


def git(folder: Path, *words: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *own, "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout.strip()


def test_git_commit_is_checked_out_one(tmp_path: Path) -> None:
    project = tmp_path / "repository" / "project"
    project.mkdir(parents=True)
    assert git_commit(project) is None
    git(project.parent, "init", "-q")
    (project / "model.py").write_text("one")
    git(project.parent, "add", ".")
    git(project.parent, "commit", "-q", "-m", "first")
    head = git(project.parent, "rev-parse", "HEAD")
    (project / "not_tracked.txt").write_text("")
    (project.parent / "elsewhere.txt").write_text("")
    assert git_commit(project) == head
    (project / "model.py").write_text("two")
    assert git_commit(project) == f"{head}+changes"
