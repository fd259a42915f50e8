"""One real batch before a run: faults of a recipe, a transform or a row are reported here already."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from penstock.errors import DataError, SpecError, TrainingError
from penstock.flows.preflight.try_batch import try_one_batch
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.check import _describe_model, check_pipeline
from penstock.flows.verbs.init import create_project
from penstock.tasks.project import Project
from penstock.training.recipe import Recipe
from penstock.training.spec import TrainSpec
from tests.drills.project import make_project


def project(tmp_path: Path, method: str = "", transform: str = "") -> Project:
    """A project whose recipe has one more method, or another `map_batches` function."""
    file = make_project(tmp_path / "p", files=2)
    with (file.parent / "model.py").open("a") as model:
        model.write(method)
    if transform:
        (file.parent / "transforms.py").write_text(transform)
    loaded = load_spec(file)
    return loaded.project


def test_good_batch_is_described(tmp_path: Path) -> None:
    found = try_one_batch(project(tmp_path))
    assert found["loss"] == try_one_batch(project(tmp_path / "again"))["loss"], "the seed decides about weights"
    assert found["rows"] == 2, "batch norm needs two, and the driver's machine may be small"
    assert found["columns"] == {"image": "float32[64]", "mean": "float32", "label": "int64"}
    assert found["parameters"] == 65 * 32 + 32 + 32 * 10 + 10
    assert found["predict_shape"] == [2, 10]
    assert found["loss"] > 0


def test_batch_is_tried_in_worker_on_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float | str, str]] = []
    said: list[str] = []

    def on_one_worker(spec: TrainSpec, what: str, work: Callable[[], Any], say: Callable[[str], None]) -> Any:
        say("waits")
        print("of its own")
        asked.append((spec.cpus_per_worker, what))
        return pickle.loads(pickle.dumps(work))()

    monkeypatch.setattr("penstock.training.on_ray.one_worker.on_one_worker", on_one_worker)
    assert try_one_batch(project(tmp_path), on_cluster=True, report=said.append)["rows"] == 2
    assert asked == [(0.5, "the first batch")] and said == ["waits", "first batch: of its own"]


def test_check_reports_each_part_and_runs_no_stage(tmp_path: Path) -> None:
    said: list[str] = []
    made = project(tmp_path, "    FILES = ('words.txt', 'data/train/part-0.parquet')\n    print('of the recipe')\n")
    (made.base_dir / "words.txt").write_text("one")
    transforms = made.base_dir / "transforms.py"
    transforms.write_text(f"import os\n{transforms.read_text()}\n\nscale.by = os.environ.get('DRILL_PAUSE_S')\n")
    lines = enumerate((made.base_dir / "model.py").read_text().splitlines(), 1)
    reads = {f"model.py:{number}" for number, line in lines if "os.environ" in line} | {"transforms.py:10"}
    result = check_pipeline(load_spec(made.base_dir), said.append)
    said.remove("recipe: of the recipe")
    said.remove("first batch: of the recipe")
    warned = said.pop().removesuffix(": reads environment variables, whose values no key covers")
    assert set(warned.removeprefix("warning: ").split(", ")) == reads
    reported = ["spec", "storage", "recipe", "sources", "ships", "one batch", "serving", "training"]
    assert [line.split("  ")[0] for line in said] == reported
    ships = ("model.py", "smoothing.txt", "transforms.py", "width.txt", "words.txt")
    assert result["ships"] == {name: (made.base_dir / name).stat().st_size for name in ships}
    assert "words.txt (3 bytes)" in said[4] and ".parquet" not in said[4]
    assert (result["status"], result["rows"], result["files"]) == ("done", 1797, 2)
    assert not made.storage.list("stages")
    assert said[5].endswith(" 2,442 parameters"), "nothing that is learnt makes the model larger"
    assert said[6] == "serving    ok   the registered model asks for image, mean"


def test_check_refuses_a_glob_of_code_files_without_files(tmp_path: Path) -> None:
    file = project(tmp_path).base_dir / "pipeline.yaml"
    with pytest.raises(SpecError, match=r"code\.files: 'words/\*\*' matches no file in"):
        check_pipeline(load_spec(file, ["code.files=['*.txt', 'words/**']"]), print)


@pytest.mark.parametrize("rows", [100, 600])
def test_label_of_one_class_is_named_by_check(tmp_path: Path, rows: int) -> None:
    folder = project(tmp_path).base_dir
    for file in folder.glob("data/**/*.parquet"):
        table = pq.read_table(file).slice(0, rows)
        column = table.schema.get_field_index("label")
        pq.write_table(table.set_column(column, "label", pa.array([0] * len(table))), file)
    if rows == 100:  # the sample is the whole
        with pytest.raises(DataError, match=r"the label 'label' has one class, 0, in all 200 rows of train") as refused:
            check_pipeline(load_spec(folder), print)
        assert refused.value.next_step.startswith("check the label, data.train")
        return
    *_, warned = check_pipeline(load_spec(folder), print)["warnings"]
    assert warned.startswith(
        "the label 'label' has one class in a sample of 512 rows, which is tried as one of two; a run needs"
    )


def test_check_warns_of_one_class_other_than_0(tmp_path: Path) -> None:
    folder = project(tmp_path).base_dir
    for file in folder.glob("data/**/*.parquet"):
        table = pq.read_table(file).slice(0, 100)
        column = table.schema.get_field_index("label")
        pq.write_table(table.set_column(column, "label", pa.array([1] * len(table))), file)
    *_, warned = check_pipeline(load_spec(folder), print)["warnings"]
    assert warned.startswith("the label 'label' has one class, 1, in all 200 rows of train: every metric will be perfect")


def test_check_trains_two_batches_of_a_function(tmp_path: Path) -> None:
    said: list[str] = []
    result = check_pipeline(load_spec(create_project(tmp_path / "p", "ray-loop")[0]), said.append)
    assert "one batch  ok   2 rows, prepared" in said
    size = result["batch"]["trained"]["checkpoint_bytes"]
    words = f"2 batches; reported train/loss, val/accuracy, epoch; a checkpoint of {size:,} bytes was saved and loaded"
    assert f"training   ok   {words}" in said and size > 100_000
    without_parameters = {"parameters": 0, "loss": 0.5, "sized_by_sample": []}  # as of a package's nearest neighbours
    assert "loss 0 (perhaps the rows tried are of one class)" in _describe_model({**without_parameters, "loss": 0.0}, 2)
    assert _describe_model(without_parameters, 2) == "loss 0.5, 0 parameters"


def test_times_without_a_collate_fn_are_refused_by_first_batch(tmp_path: Path) -> None:
    file = create_project(tmp_path / "p", "ray-loop")[0]
    for part in file.parent.glob("data/**/*.parquet"):
        table = pq.read_table(part)
        pq.write_table(table.append_column("when", pa.array([0] * len(table), pa.timestamp("us"))), part)
    with pytest.raises(SpecError, match=r"iter_torch_batches\(\) cannot make tensors of when \(timestamp\[us\]\)"):
        try_one_batch(load_spec(file).project)
    with (file.parent / "loop.py").open("a") as loop:
        loop.write("\n\ndef train_func_by_rows(config):\n    ray.train.get_dataset_shard('train').iter_batches()\n")
    assert try_one_batch(load_spec(file, ["train.loop=loop.py:train_func_by_rows"]).project)["rows"] == 2
    best = "train.checkpoint.best={metric: my_accuracy, mode: max}"
    assert try_one_batch(load_spec(file, [best]).project)["rows"] == 2, "a name that only a report of the function has"


def test_parameter_count_from_sample_names_the_sample(tmp_path: Path) -> None:
    said: list[str] = []
    steps = "preprocess=[{map_batches: 'transforms.py:scale'}, {ordinal: {columns: [label]}}]"
    result = check_pipeline(load_spec(project(tmp_path).base_dir, [steps]), said.append)
    assert said[5].endswith(" 2,442 parameters by a sample of 512 rows; ordinal may find more categories in all 1,797")
    assert result["batch"]["sized_by_sample"] == ["ordinal"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            "    def loss(self, model, batch): return model.weight.sum() * float('nan')\n",
            "'Sequential' object has no attribute",
        ),
        ("    def loss(self, model, batch): return model[0].weight.sum() * float('nan')\n", "loss of the first batch is nan"),
        ("    def loss(self, model, batch): return torch.tensor(1.0)\n", "does not depend on the model's parameters"),
        ("    def loss(self, model, batch): return self.predict(model, batch)\n", r"a tensor of shape \[2, 10\]"),
        ("    def predict(self, model, batch): return model(batch['pixels'])\n", r"loss\(\) failed: .*'pixels'"),
        (
            "    def predict(self, model, batch): return torch.full((2, 10), 0.1) + 0 * model[0].weight.sum()\n",
            "are they probabilities or logits",
        ),
        (
            "    def predict(self, model, batch): return model(torch.cat([batch['image'], batch['label'][:, None]], dim=1))\n",
            r"(?s)predict\(\) failed: KeyError: 'label' .*model\.py:\d+.*Next: predict without 'label'",
        ),
        (
            "    def predict(self, model, batch): return batch['mean'][:, None] + model[0].weight.sum()\n"
            "    def loss(self, model, batch): return self.predict(model, batch).mean()\n",
            r"(?s)Net.predict returned one number a row; label 'label' has 10 classes.*cast: \{label: float32\}",
        ),
        (
            "    def loss(self, model, batch):\n"
            "        found = batch['mean'][:, None] + model[0].weight.sum()\n"
            "        return torch.nn.functional.mse_loss(found, batch['mean'])\n",
            r"(?s)Using a target size .* different to the input size .*Next: .*give both the same shape",
        ),
        ("    def optimizer(self, model): return model\n", "returned a Sequential, not a torch.optim.Optimizer"),
        (
            "    def augment(self, batch, generator): return {**batch, 'image': batch['image'] + torch.rand(64)}\n",
            r"augment\(\) is not repeatable: column 'image' differs between two calls",
        ),
        (
            "    def augment(self, batch, generator): return {**batch, 'image': batch['image'].roll(os.getpid(), generator)}\n",
            r"augment\(\) failed",
        ),
        (
            "    def augment(self, batch, generator): return {name: column[1:] for name, column in batch.items()}\n",
            r"Net.augment returned a tensor of shape \[1, 64\] for column 'image' in a batch of 2 rows",
        ),
        ("    def augment(self, batch, generator): batch['image'] += 1\n", "Net.augment returned a NoneType, not a dict"),
        ("    def augment(self, batch, generator): return {**batch, 'size': 3}\n", "augment returned a int for column 'size'"),
        (
            "    def augment(self, batch, generator): return {**batch, str(torch.rand(1)): batch['mean']}\n",
            r"augment\(\) is not repeatable: column",
        ),
    ],
)
def test_recipe_that_fails_or_cannot_resume_is_refused(tmp_path: Path, method: str, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        try_one_batch(project(tmp_path, "\n" + method))


TWO = """\
import torch


class Net:
    def build_model(self, schema):
        return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def loss(self, model, batch):
        return self.predict(model, batch).square().mean()

    def predict(self, model, batch):
        found = model(batch["image"])
        return found
"""


@pytest.mark.parametrize(
    ("found", "refused"),
    [
        ("torch.sigmoid(found)", True),
        ("torch.sigmoid(found)[:, 0]", True),
        ("0.1 + found.abs() / 9", False),
        ("found[:, 0] * 0 + 0.25", False),
        ("found[:, 0]", False),
        ("found * 0 + model[2].bias.abs()", False),
    ],
)
def test_undeclared_sigmoid_of_two_classes_is_refused(tmp_path: Path, found: str, refused: bool) -> None:
    made = project(tmp_path)
    for file in made.base_dir.glob("data/**/*.parquet"):
        table = pq.read_table(file)
        column = table.schema.get_field_index("label")
        pq.write_table(table.set_column(column, "label", pa.array(table["label"].to_numpy() % 2)), file)
    (made.base_dir / "model.py").write_text(TWO.replace("return found", f"return {found}"))
    if not refused:
        assert try_one_batch(load_spec(made.base_dir).project)["rows"] == 2
        return
    with pytest.raises(TrainingError, match="numbers from 0 to 1; are they probabilities or logits"):
        try_one_batch(load_spec(made.base_dir).project)
    with (made.base_dir / "model.py").open("a") as model:
        model.write("\n    predicts = 'probabilities'\n")
    assert try_one_batch(load_spec(made.base_dir).project)["rows"] == 2


@pytest.mark.parametrize(("depth", "zeros", "end"), [(14, False, "sigmoid"), (1, True, "sigmoid"), (1, False, "none")])
def test_undeclared_sigmoid_is_seen_at_any_depth(depth: int, zeros: bool, end: str) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(8, 8), torch.nn.ReLU())]
    model, rows = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1)), torch.randn(2, 8)
    if zeros:
        torch.nn.init.zeros_(model[-1].weight)
        torch.nn.init.zeros_(model[-1].bias)

    @torch.no_grad()
    def predict() -> torch.Tensor:
        return torch.sigmoid(model(rows)) if end == "sigmoid" else model(rows)

    with pytest.raises(TrainingError, match="numbers from 0 to 1") if end == "sigmoid" else contextlib.nullcontext():
        Recipe(object(), "m.py:M").refuse_undeclared(predict().clamp(0, 1), 2, model, predict)


@pytest.mark.drill
@pytest.mark.parametrize("name", ["xgboost", "lightgbm"])
def test_trees_of_a_sweep_are_tried_before_it(tmp_path: Path, name: str) -> None:
    file = make_project(tmp_path / "p", files=2)
    file.write_text(file.read_text().replace("recipe: model.py:Net", f"framework: {name}"))
    space = "{train.params.max_depth: {choice: [2, 3]}}"

    def tried(metric: str, **params: object) -> dict[str, Any]:
        given = [f"train.params={json.dumps(params)}", f"tune={{space: {space}, metric: {metric}, mode: max}}"]
        return try_one_batch(load_spec(file, given).project, for_sweep=True)

    with pytest.raises(SpecError, match=r"tune\.metric is 'val/acuracy', which validation does not measure"):
        tried("val/acuracy")
    if name == "xgboost":  # which takes what it does not know for a warning
        with pytest.raises(SpecError, match=r"max_dpeth is not used"):
            tried("val/accuracy", max_dpeth=3)
    else:
        assert tried("val/accuracy")["trained"]["checkpoint_bytes"] > 0


def test_sweep_metric_must_be_measured(tmp_path: Path) -> None:
    loss = "    def loss(self, model, batch):\n        found = self.predict(model, batch).mean()\n"
    file = project(tmp_path, "\n" + loss + "        return {'loss': found, 'kl': found}\n").base_dir / "pipeline.yaml"

    def tried(metric: str, *more: str, for_sweep: bool = True) -> dict[str, Any]:
        space = "{train.learning_rate: {range: [0.1, 1]}}"
        loaded = load_spec(file, [f"tune={{space: {space}, metric: {metric}, mode: max}}", *more])
        return try_one_batch(loaded.project, for_sweep=for_sweep)

    with pytest.raises(SpecError, match=r"tune\.metric is 'val/auroc', which validation does not measure") as caught:
        tried("val/auroc")
    assert caught.value.next_step == "choose one of val/loss, val/accuracy, val/f1, val/kl"
    with pytest.raises(SpecError, match=r"measure; did you mean 'val/accuracy'\?"):
        tried("val/acuracy", "train.callbacks=[ema, early_stopping]")
    assert tried("val/auroc", for_sweep=False)["rows"] == 2, "a run ignores the section"
    file.with_name("mine.py").write_text("class Mine:\n    def step(self, training):\n        pass\n")
    for metric, *more in (
        ["val/kl"],
        ["val/auroc", "train.checkpoint.best={metric: val/auroc, mode: max}"],
        ["val/mine", "train.callbacks=[mine.py:Mine]"],
    ):
        assert tried(metric, *more)["rows"] == 2
    with file.with_name("model.py").open("a") as model:
        model.write("import penstock\n")
    assert tried("val/mine")["rows"] == 2, "it may log that in some batches"


def test_check_names_start_weights(tmp_path: Path) -> None:
    made = project(tmp_path)
    file = made.base_dir / "pipeline.yaml"
    torch.save({"0.bias": torch.zeros(32), "old": torch.zeros(1)}, made.base_dir / "fits.pt")
    torch.save({"0.bias": torch.zeros(31)}, made.base_dir / "fits_nothing.pt")
    said: list[str] = []
    result = check_pipeline(load_spec(file, ["train.start_from=fits.pt"]), said.append)
    told = "1 of 4 weights are those of fits.pt; new: 0.weight, 3.weight, 3.bias; left: old"
    assert result["batch"]["begins_with"] == told and f"start      ok   {told}" in said
    with pytest.raises(TrainingError, match=r"none of the 1 weights of fits_nothing\.pt fits the model") as caught:
        try_one_batch(load_spec(file, ["train.start_from=fits_nothing.pt"]).project)
    assert caught.value.problems[0] == "there: 0.bias [31]" and "0.bias [32]" in caught.value.problems[1]


def test_augmentation_with_generator_passes(tmp_path: Path) -> None:
    method = "    def augment(self, batch, generator):\n"
    method += "        return {**batch, 'image': batch['image'] + generator.normal(64), 'extra': generator.integers(0, 2)}\n"
    assert try_one_batch(project(tmp_path, "\n" + method))["predict_shape"] == [2, 10]


def test_nan_is_not_nondeterminism(tmp_path: Path) -> None:
    method = "    def augment(self, batch, generator): return {**batch, 'extra': batch['mean'] * float('nan')}\n"
    assert try_one_batch(project(tmp_path, "\n" + method))["rows"] == 2


LISTS = """\
name: lists
data: {format: parquet, train: rows.parquet, label: label}
preprocess: [{ragged: {columns: [tokens]}}]
shuffle: {by_length: {column: tokens}}
train: {recipe: model.py:Reader, batch_rows: 256, workers: 2, accumulate: 2}
"""

READER = """\
import torch


class Reader:
    def build_model(self, schema):
        return torch.nn.EmbeddingBag(9, schema.num_classes)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(self.predict(model, batch), batch["label"])

    def predict(self, model, batch):
        return model(batch["tokens"])
"""


@pytest.mark.parametrize(
    ("budget", "rows"),
    [
        ("null", 2),
        ("400", 2),
        ("9", 1),  # a row beyond the budget is a step of its own
    ],
)
def test_tried_batch_fits_the_budget_of_entries(tmp_path: Path, budget: str, rows: int) -> None:
    table = pa.table({"tokens": [[row % 9] * 10 for row in range(400)], "label": [row % 2 for row in range(400)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "model.py").write_text(READER)
    (tmp_path / "pipeline.yaml").write_text(LISTS)
    loaded = load_spec(tmp_path, [f"shuffle.by_length.batch_entries={budget}"])
    found = try_one_batch(loaded.project)
    assert (found["rows"], found["predict_shape"]) == (rows, [rows, 2])


def test_missing_sampling_column_is_refused(tmp_path: Path) -> None:
    made = project(tmp_path)
    loaded = load_spec(made.base_dir / "pipeline.yaml", ["shuffle.sample={balance: mean}"])
    with pytest.raises(SpecError, match="column 'mean' holds float32, and classes are integers"):
        try_one_batch(loaded.project)


def test_split_by_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    file = project(tmp_path).base_dir / "pipeline.yaml"
    loaded = load_spec(file, ["data.validation={by: label, after: 2026-01-01}"])
    with pytest.raises(DataError, match=r"data.validation: after and before are times, and column 'label' is int64"):
        try_one_batch(loaded.project)


def test_transform_error_names_source_file(tmp_path: Path) -> None:
    scale = "import numpy as np\ndef scale(batch):\n    batch['image'] = np.stack(batch['image']) / np.nan\n    return batch\n"
    with pytest.raises(DataError, match="in a sample of 512 rows") as caught:
        try_one_batch(project(tmp_path, transform=scale))
    said = "\n".join([caught.value.message, *caught.value.problems])
    assert "data/train/part-0.parquet" in said and "penstock-sample" not in said


def test_missing_transform_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="scale"):
        try_one_batch(project(tmp_path, transform="def other(batch): return batch\n"))


PIXELS = """\
import torch


class Pixels:
    def build_model(self, schema):
        return torch.nn.Linear(48, schema.num_classes)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch["image"].flatten(1).float()), batch["label"])
"""


def test_sample_decodes_image_files_as_run_does(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / "data" / label / f"{number}.png")
    (tmp_path / "model.py").write_text(PIXELS)
    (tmp_path / "pipeline.yaml").write_text(
        "name: pixels\ndata: {format: images, train: data, label: label, validation: {fraction: 0.2}}\n"
        "preprocess: [label_encoder]\ntrain: {recipe: model.py:Pixels, batch_rows: 8}\n"
    )
    loaded = load_spec(tmp_path)
    found = try_one_batch(loaded.project)
    assert found["columns"] == {"image": "uint8[4, 4, 3]", "label": "int64"}
