"""Every input that a stage's output depends on changes its key: fields of the pipeline file, code, rows, files and versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from penstock.flows.spec_file import load_spec
from penstock.tasks.project import Project
from penstock.tasks.records import keys
from penstock.tasks.records.keys import StageKey, stage_keys
from penstock.tasks.stages import STAGES, StageName
from penstock.training.callbacks.registry import CALLBACKS
from tests.plugin_package import install_package
from tests.tasks.records.test_keys import HELPERS, MODEL, PREPARED, changed, make, outputs

PIPELINE = """\
name: keys
data: {format: csv, train: rows/, label: y, validation: {fraction: 0.5}, invalid: drop}
preprocess:
  - map_batches: transforms.py:scale
train: {recipe: model.py:Net, batch_rows: 8, callbacks: [{early_stopping: {patience: 3}}]}
evaluate: {slices: [country]}
register: {promote: {metric: val/accuracy}}
"""

OF_LOOP = """\
name: keys
data: {{format: csv, train: rows/, label: y, datasets: {{order: {}/}}}}
train: {{loop: loop.py:loop}}
"""

OF_FIELD: dict[str, set[StageName]] = {
    "name": {"register"},
    "data": {"read", "register"},
    "data.label": {"preprocess", "register"},
    "data.invalid": {"preprocess"},
    "data.any_type": {"preprocess"},
    "data.images": {"preprocess", "register"},
    "data.duplicates": {"materialize"},
    "preprocess": {"preprocess"},
    "materialize": {"materialize"},
    "shuffle": {"shuffle"},
    "shuffle.seed": {"shuffle", "train"},
    "train": {"train"},
    "evaluate": {"evaluate"},
    "evaluate.slices": {"evaluate", "register"},
    "register": {"register"},
}
"""Field, or section, of the pipeline file -> the stages whose output depends on it; the longest one counts."""

DECIDE_NOTHING = {
    *("storage", "stores", "tracking", "tune", "retention", "code", "prepare"),
    *("train.retries", "train.wait_s", "train.stall_s", "train.checkpoint.keep", "train.checkpoint.keep_best"),
    *("train.resources", "train.placement", "train.backend.timeout_s", "train.backend.init_method"),
    *("train.checkpoint.every_steps", "train.checkpoint.every_s", "train.checkpoint.every_epoch"),
}
"""Fields that change how a command runs. What `code.files` and `tracking.registry` name counts, see test_keys.py."""

NAMES_OF_THINGS = {"data.train", "data.format", "data.test", "train.framework", "train.recipe", "train.callbacks"}
NAMES_OF_THINGS |= {"train.start_from", "train.datasets", "train.loop", "data.validation", "data.datasets"}
"""Fields that name something else, which must exist: it counts by its content."""


def leaves(section: BaseModel, prefix: str = "") -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value, path = getattr(section, name), f"{prefix}{field.alias or name}"
        if isinstance(value, BaseModel) and path != "register.promote":
            yield from leaves(value, f"{path}.")
        else:
            yield path


def other(value: Any) -> Any:
    """Another value of a field, which nothing checks."""
    match value:
        case bool():
            return not value
        case float():
            return value / 2 + 0.01
        case int():
            return value + 1
        case str():
            return f"{value}x"
        case list() | tuple():
            return [*value, *value] if value else ["other"]
        case dict():
            return {**value, "other": 1}
    return "other"


def with_other(section: Any, path: str) -> Any:
    name, _, rest = path.partition(".")
    name = "register_" if name == "register" and hasattr(section, "register_") else name
    value = getattr(section, name)
    return section.model_copy(update={name: with_other(value, rest) if rest else other(value)})


def of_field(path: str) -> set[StageName]:
    known = [each for each in OF_FIELD if f"{path}.".startswith(f"{each}.")]
    return OF_FIELD[max(known, key=len)]


def keys_in(folder: Path, recorded: dict[str, Any] = PREPARED) -> dict[str, StageKey]:
    return stage_keys(load_spec(folder / "pipeline.yaml").project, lambda stage, _key: recorded.get(stage))


def write(name: str, text: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    return lambda folder, _patch: (folder / name).write_text(text) and None


def other_versions(_folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keys, "version_of", lambda _name: "0.1")


def other_schema(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(PREPARED["materialize"]["feed_schema"], "label", "z")


INPUTS: dict[StageName, list[Callable[[Path, pytest.MonkeyPatch], None]]] = {
    "read": [write("rows/a.csv", "x,y\n1,0\n2,2\n"), write("rows/b.csv", "x,y\n1,0\n"), other_versions],
    "preprocess": [write("helpers.py", HELPERS.replace("2.0", "3.0")), other_versions],
    "materialize": [other_versions],
    "shuffle": [write("helpers.py", HELPERS.replace("2.0", "3.0"))],
    "train": [write("model.py", MODEL.replace("batch)", "rows)")), other_versions, other_schema],
    "evaluate": [write("rows/a.csv", "x,y,country\n1,0,SE\n2,1,DE\n"), write("model.py", MODEL.replace("batch)", "rows)"))],
    "register": [
        write("helpers.py", HELPERS.replace("2.0", "3.0")),
        write("rows/a.csv", "x,y,country\n1,0,SE\n2,1,DE\n"),
        other_versions,
    ],
}
"""Inputs that are not fields."""

ROWS: dict[StageName, list[dict[str, Any]]] = {
    "train": [outputs(train="t2"), outputs(order="o2")],
    "evaluate": [outputs(test="h2"), outputs(validation="v2"), outputs(train="t2")],
    "register": [outputs(test="h2"), outputs(validation="v2"), {**PREPARED, "preprocess": {"fitted": 2}}],
}
"""What the stages before training left on record, with one digest changed."""


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("stage", STAGES)
def test_each_input_of_a_stage_changes_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: StageName) -> None:
    make(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    loaded = load_spec(tmp_path / "pipeline.yaml")
    before = keys_in(tmp_path)
    tried = 0
    for path in leaves(loaded.spec):
        if path in NAMES_OF_THINGS:
            continue
        nothing = any(f"{path}.".startswith(f"{each}.") for each in DECIDE_NOTHING)
        if nothing or stage not in of_field(path):
            continue
        tried += 1
        project = Project(with_other(loaded.spec, path), loaded.project.base_dir)
        after = stage_keys(project, lambda each, _key: PREPARED.get(each))
        assert stage in changed(before, after), path
    assert tried
    for recorded in ROWS.get(stage, []):
        assert stage in changed(before, keys_in(tmp_path, recorded)), recorded
    for change in INPUTS[stage]:
        with monkeypatch.context() as patch:
            kept = {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
            change(tmp_path, patch)
            assert stage in changed(before, keys_in(tmp_path)), change
            for file in [file for file in tmp_path.rglob("*") if file.is_file()]:
                file.write_text(kept[file]) if file in kept else file.unlink()
    assert changed(before, keys_in(tmp_path)) == set()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_fields_that_decide_nothing_change_no_key(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "pipeline.yaml").write_text(PIPELINE)
    loaded = load_spec(tmp_path / "pipeline.yaml")
    before = keys_in(tmp_path)
    for path in leaves(loaded.spec):
        if path != "tracking.registry" and any(f"{path}.".startswith(f"{each}.") for each in DECIDE_NOTHING):
            project = Project(with_other(loaded.spec, path), loaded.project.base_dir)
            assert changed(before, stage_keys(project, lambda each, _key: PREPARED.get(each))) == set(), path


def test_further_dataset_counts_by_its_rows_and_hides_no_input(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "loop.py").write_text("def loop(config): ...\n")
    moved = {}
    for place in ("more", "elsewhere"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.csv").write_text("x,y\n1,0\n")
        (tmp_path / "pipeline.yaml").write_text(OF_LOOP.format(place))
        moved[place] = keys_in(tmp_path)
    assert changed(moved["more"], moved["elsewhere"]) == set()
    assert "train" in changed(moved["elsewhere"], keys_in(tmp_path, outputs(order="o2")))


def test_callback_of_a_package_is_in_train_key_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    found = {}
    for version in ("1.0", "2.0"):
        source = "class Scaled:\n    def step(self, training): ...\n"
        site = install_package(tmp_path / version, CALLBACKS.group, 'scaled = "acme_scaled:Scaled"', source, version=version)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(site))
            CALLBACKS.__dict__.pop("_added", None)
            project = load_spec(tmp_path / "pipeline.yaml", ["train.callbacks=[scaled]"]).project
            (callback,) = project.callbacks
            found[version] = stage_keys(project, lambda stage, _key: PREPARED.get(stage)), callback.origin
            CALLBACKS.__dict__.pop("_added", None)
    assert changed(found["1.0"][0], found["2.0"][0]) == {"train", "evaluate", "register"}
    assert [origin for _, origin in found.values()] == ["acme-penstock==1.0", "acme-penstock==2.0"]
