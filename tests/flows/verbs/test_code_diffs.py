"""A diff of code holds what a run reaches, and names what does something else."""

from __future__ import annotations

from pathlib import Path

from penstock.flows.verbs.compare import code_diffs
from penstock.tasks.records.changes import changes
from tests.drills.project import make_project
from tests.tasks.records.test_changes import edit, side


def test_changed_method_shows_its_diff(tmp_path: Path) -> None:
    file = make_project(tmp_path, files=1)
    before = side(file, "a")
    edit(file.parent / "model.py", "nn.Dropout(0.3)", "nn.Dropout(0.2)")
    (file.parent / "model.py").write_text((file.parent / "model.py").read_text() + "\n\ndef unused():\n    return 1\n")
    after = side(file, "b")
    (diff,) = code_diffs(before, after, changes(before, after))
    assert (diff["file"], diff["names"]) == ("model.py", ["Net.build_model"])
    head, *lines = diff["diff"]
    assert head.startswith("@@ Net")
    assert [line[:1] for line in lines if line[:1] in "+-"] == ["-", "+"]
    assert any("Dropout(0.2)" in line for line in lines if line.startswith("+")) and "unused" not in "".join(lines)
    assert code_diffs(before, before, changes(before, before)) == []
