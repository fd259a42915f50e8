"""Differences of two runs are named down to the function, and nothing that does not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.flows.spec_file import load_spec
from penstock.tasks.records.changes import changes, why_run
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Run
from tests.drills.project import make_project


def side(file: Path, run: str, overrides: tuple[str, ...] = ()) -> Run:
    loaded = load_spec(file, overrides)
    project = loaded.project
    keys = stage_keys(project, lambda _stage, _key: None)
    return Run(run=run, pipeline="p", created="", spec=loaded.spec.model_dump(mode="json", by_alias=True), keys=keys)


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_change_of_code_names_the_definition(tmp_path: Path) -> None:
    file = make_project(tmp_path, files=2)
    before = side(file, "a")
    edit(file.parent / "model.py", "nn.Dropout(0.3)", "nn.Dropout(0.2)")
    edit(file.parent / "transforms.py", "/ 16", "/ 8.0  # half")
    (file.parent / "data" / "train" / "part-0.parquet").rename(file.parent / "data" / "train" / "part-9.parquet")
    after = side(file, "b", ("train.epochs=9",))
    found = changes(before, after)
    assert found.lines() == [
        "data: added train/part-9.parquet",
        "data: gone train/part-0.parquet",
        "code: transforms.py:scale, model.py:Net",
        "spec: train.epochs: 6 -> 9",
    ]
    assert why_run("train", after.keys["train"], before, after.run) == ["train.epochs: 6 -> 9", "code: model.py:Net changed"]
    assert why_run("preprocess", after.keys["preprocess"], before, after.run) == [
        "code: transforms.py:scale changed",
        "read has changed",
    ]
    key = after.keys["train"]
    prepared = key.model_copy(update={"inputs": {**key.inputs, "rows.order": "1e82632c", "rows.seed": 0}})
    assert why_run("train", prepared, after, after.run) == ["its rows had not been prepared before"]
    assert why_run("read", after.keys["read"], None, after.run) == ["it has never run"]
    assert why_run("read", before.keys["read"], before, before.run) == ["it was not finished before"]


def test_other_class_is_named_once_without_shared_code(tmp_path: Path) -> None:
    file = make_project(tmp_path, files=1)
    methods = "".join(f"    def {name}(self, *_):\n        return 1\n" for name in ("build_model", "loss", "a", "b"))
    with open(file.parent / "model.py", "a") as model:
        model.write(f"\n\nclass Wider(Net):\n    def loss(self, model, batch):\n        return 2\n\n\nclass Plain:\n{methods}")
    net, wider, plain = (side(file, name, (f"train.recipe=model.py:{name}",)) for name in ("Net", "Wider", "Plain"))
    assert changes(net, wider).lines() == ["code: model.py:Wider", "spec: train.recipe: model.py:Net -> model.py:Wider"]
    assert changes(net, plain).code == ("model.py:HERE", "model.py:Net", "model.py:Plain", "smoothing.txt", "width.txt")
    edit(file.parent / "model.py", "return 1\n", "return 3\n")
    edited = side(file, "Plain", ("train.recipe=model.py:Plain",))
    assert why_run("train", edited.keys["train"], plain, edited.run) == ["code: model.py:Plain changed"]


def test_comments_and_unreached_code_are_not_changes(tmp_path: Path) -> None:
    file = make_project(tmp_path, files=1)
    before: Any = side(file, "a")
    edit(
        file.parent / "model.py",
        "class Net:",
        'def unused():\n    return 1\n\n\nclass Net:\n    """A net."""\n\n    # so small\n',
    )
    after = side(file, "b")
    assert changes(before, after).lines() == []
    reached = after.keys["train"].inputs["code.model.py:Net"]
    assert sorted(name for name in reached if name.startswith("model.py")) == ["model.py:HERE", "model.py:Net"]
