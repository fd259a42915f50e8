"""Does a Keras model go on to the same weights, from the middle and the end of an epoch, with each backend that is here?"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import CheckpointError, SpecError
from penstock.storage import Storage
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.start_from import find_start
from penstock.training.evaluation.evaluate import evaluate
from penstock.training.frameworks.keras.framework import KERAS
from penstock.training.frameworks.loops.own_loop import installed
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, load_model
from penstock.training.on_ray.worker import RankResult
from penstock.training.ranks import Group
from penstock.training.session.shard import Shard
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture
from tests import ROOT
from tests.training.digits import CPU, ROWS, SCHEMA, ListClient, make_job, train_alone
from tests.training.test_ray_train import loop_job, session_of

if not installed("keras"):  # to import it would choose its backend
    pytest.skip('pip install "penstock[keras]"', allow_module_level=True)

BACKENDS = [
    "torch",
    pytest.param(
        "tensorflow",
        marks=pytest.mark.skipif(
            not installed("tensorflow", "tensorflow-cpu"), reason="TensorFlow is 600 MB; `make frameworks` installs it"
        ),
    ),
]
EVERY = {"every_s": None, "every_steps": 4, "keep": 100, "best": {"metric": "val/accuracy", "mode": "max"}}


def keras_job(folder: Path, run: str, target: str = "digits", attempt: int = 1, **spec: Any) -> TrainJob:
    job = make_job(folder, run=run, attempt=attempt)
    given = {"framework": "keras", "recipe": f"keras_models.py:{target}", "epochs": 3, "batch_rows": 32, "checkpoint": EVERY}
    given |= spec
    return replace(job, spec=TrainSpec.model_validate(given), code=capture(str(given["recipe"]), Path(__file__).parent))


def train(folder: Path, attempt: int, *runs: str) -> None:
    """In a process of its own, as after a kill: what chooses Keras' backend is the first import."""
    for run in runs:
        result = KERAS.run_rank(keras_job(folder, run, attempt=attempt), Group(0, 1, CPU), ListClient())
        print(result.status, result.state.step, result.resumed_from_step, result.exactness)


def in_a_process(backend: str, *arguments: object, function: str = "train") -> str:
    call = f"import pathlib; from {__name__} import {function}; {function}(pathlib.Path({arguments[0]!r}), *{arguments[1:]!r})"
    command = [sys.executable, "-c", call]
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize("backend", BACKENDS)
def test_resume_from_any_checkpoint_ends_with_same_weights(tmp_path: Path, backend: str) -> None:
    assert in_a_process(backend, str(tmp_path), 1, "whole").split() == ["finished", "33", "None", "bit-exact"]
    whole = keras_job(tmp_path, "whole")
    there = job_checkpoints(whole).committed()
    assert [item.manifest.step for item in reversed(there)] == [4, 8, 11, 12, 16, 20, 22, 24, 28, 32, 33]
    for step in (8, 11):  # in the middle of an epoch, and at its end
        shutil.copytree(tmp_path / "whole", tmp_path / f"from-{step}")
        for item in there:
            if item.manifest.step > step:
                shutil.rmtree(tmp_path / f"from-{step}" / "checkpoints" / item.name)
    said = in_a_process(backend, str(tmp_path), 2, "from-8", "from-11").split()
    assert said == ["finished", "33", "8", "bit-exact", "finished", "33", "11", "bit-exact"]
    for step in (8, 11):
        newest = job_checkpoints(keras_job(tmp_path, f"from-{step}")).committed()[0]
        assert newest.manifest.weights_digest == there[0].manifest.weights_digest
        assert newest.manifest.metrics == there[0].manifest.metrics
    assert there[0].manifest.metrics["val/accuracy"] > 0.5, "a guess is right in a tenth"


VARIABLE = "same-order: {} is not a variable of the model"
LABELS = {
    "tracked": "bit-exact",
    "numpy_eager": "bit-exact",
    "closure": VARIABLE.format("scaled.scale"),
    "loss_closure": VARIABLE.format("loss()"),
    "seeds": VARIABLE.format("seed_generator_state"),
    "second_optimizer": VARIABLE.format("faster_dense_bias_momentum"),
}
LABELS_OF = {
    "torch": {"torch_module": "bit-exact"},
    "tensorflow": {
        "numpy_traced": "same-order: a traced step has constants of the random generator of Python or NumPy",
        "tf_variable": VARIABLE.format("Variable"),
        "tf_random": "same-order: tf.random draws from generators that are in no checkpoint",
    },
}


OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Ftrl": {}, "Lion": {}, "Muon": {}, "ScheduleFreeAdamW": {}}
"""Those of Keras whose state differs most; all of Keras 3 were tried once."""


def stateful_job(folder: Path, name: str, attempt: int = 1) -> TrainJob:
    every = {"every_s": None, "every_steps": 2, "keep": 100}
    learns = {"optimizer": name, **OPTIMIZERS[name]} if name in OPTIMIZERS else {}
    recipe = f"stateful_models.py:{'learns_by' if learns else name}"
    return keras_job(folder, name, recipe=recipe, params=learns, attempt=attempt, max_steps=4, checkpoint=every)


def train_stateful(folder: Path, attempt: int, *names: str) -> None:
    for name in names:
        ended = KERAS.run_rank(stateful_job(folder, name, attempt), Group(0, 1, CPU), ListClient())
        print(re.sub(r"_\d+(?=[._ ])", "", ended.exactness))  # the numbers of layers, which Keras counts in a process
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        threads = sys.modules["tensorflow"].config.threading.get_intra_op_parallelism_threads()
        assert threads == torch.get_num_threads(), "their number decides the order of sums, and the label compares torch's"


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize("backend", BACKENDS)
def test_label_of_a_continued_run_is_true(tmp_path: Path, backend: str) -> None:
    labels = LABELS | LABELS_OF[backend] | dict.fromkeys(OPTIMIZERS, "bit-exact")
    in_a_process(backend, str(tmp_path), 1, *labels, function="train_stateful")
    whole = {}
    for name in labels:
        newest, *_ = there = job_checkpoints(stateful_job(tmp_path, name)).committed()
        assert [item.manifest.step for item in there] == [4, 2]
        whole[name] = newest.manifest.weights_digest
        shutil.rmtree(tmp_path / name / "checkpoints" / newest.name)
    given = in_a_process(backend, str(tmp_path), 2, *labels, function="train_stateful").splitlines()
    found = dict(zip(labels, given, strict=True))
    assert {name: label.split(", ")[0] for name, label in found.items()} == labels
    continued = {name: job_checkpoints(stateful_job(tmp_path, name)).committed()[0].manifest.weights_digest for name in labels}
    assert {name for name in labels if continued[name] == whole[name]} == {
        name for name in labels if found[name] == "bit-exact"
    }


def reasons(ended: RankResult) -> set[str]:
    """Those of `same-order`, without the names of layers, which Keras numbers in a process."""
    assert ended.exactness.startswith("same-order: ")
    return {re.sub(r"^\w+\.(?=_|seen)", "", reason) for reason in ended.exactness.removeprefix("same-order: ").split(", ")}


def test_keras_model_is_loaded_and_unread_fields_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = sys.modules.get("keras")
    if imported is not None and imported.backend.backend() != "torch":  # Keras keeps the backend of the first import
        test = f"{__file__}::{test_keras_model_is_loaded_and_unread_fields_are_refused.__name__}"
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", test]
        environment = {**os.environ, "KERAS_BACKEND": "torch"}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        return
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    job = keras_job(tmp_path, "run", epochs=1)
    KERAS.run_rank(job, Group(0, 1, CPU), ListClient())
    newest = job_checkpoints(job).committed()[0]
    spec = ModelSpec(code=job.code, params={}, feed_schema=SCHEMA, loader=KERAS.loader)
    model = load_model(spec, newest.storage)
    found = evaluate(job, model, splits=["validation"])
    assert found.metrics["val/loss"] == pytest.approx(newest.manifest.metrics["val/loss"], rel=1e-5)
    import keras

    whole = keras.models.load_model(newest.storage.local_path("model.keras"))
    image = torch.rand(3, 8, 8)
    theirs = keras.ops.convert_to_numpy(whole(image.numpy()))
    assert torch.allclose(model.predict({"image": image}, 3), torch.from_numpy(np.array(theirs)))

    own = keras_job(tmp_path, "charted", target="charted", epochs=2)
    KERAS.run_rank(own, Group(0, 1, CPU), ListClient())
    points = [point.values for point in read_journal(own.run_storage, 99)]
    assert sum(values["train/rows"] for values in points) == 2 * ROWS["train"]
    assert [values["val/rows"] for values in points if "val/rows" in values] == [ROWS["validation"]] * 2
    averaging = keras_job(tmp_path, "run", target="averaging")
    with pytest.raises(SpecError, match=r"only Model\.fit puts the averages into the weights"):
        KERAS.run_rank(averaging, Group(0, 1, CPU), ListClient())
    KERAS.run_rank(keras_job(tmp_path, "counting", target="counting", max_steps=17), Group(0, 1, CPU), ListClient())
    counting = keras_job(tmp_path, "counting", target="counting", attempt=2)
    ended = KERAS.run_rank(counting, Group(0, 1, CPU), ListClient())
    assert reasons(ended) == {"seen is not a variable of the model"}
    KERAS.run_rank(keras_job(tmp_path, "noisy", target="noisy", max_steps=17), Group(0, 1, CPU), ListClient())
    noisy = KERAS.run_rank(keras_job(tmp_path, "noisy", target="noisy", attempt=2), Group(0, 1, CPU), ListClient())
    frozen = {reason for reason in reasons(noisy) if reason.endswith(".requires_grad is not a variable of the model")}
    assert len(frozen) == 2, "kernel and bias of the layer that is frozen"
    assert reasons(noisy) - frozen == {
        "_trainable is not a variable of the model",
        "_steps is not a variable of the model",
        "keras.random without a seed draws from a generator that is in no checkpoint",
    }
    end = job_checkpoints(counting).committed()[0]
    spec = spec.model_copy(update={"code": counting.code})
    found = evaluate(counting, load_model(spec, end.storage), splits=["validation"])
    assert found.metrics["val/loss"] == pytest.approx(end.manifest.metrics["val/loss"], rel=1e-5)
    bare = keras_job(tmp_path, "run", target="not_compiled")
    with pytest.raises(SpecError, match="is not compiled"):
        KERAS.run_rank(bare, Group(0, 1, CPU), ListClient())
    with pytest.raises(SpecError, match="MultiWorkerMirroredStrategy"):
        KERAS.check(job.code, job.spec.model_copy(update={"workers": 2}))
    with pytest.raises(SpecError, match=r"(?s)train\.learning_rate is not read.*train\.compile is not read"):
        KERAS.check(job.code, job.spec.model_copy(update={"learning_rate": 0.5, "compile": True}))


def test_model_begins_with_the_variables_of_another_run(tmp_path: Path) -> None:
    def trained(run: str, target: str = "digits", steps: int = 1, start: str | None = None) -> str:
        job = keras_job(tmp_path, f"runs/{run}", target=target, max_steps=steps, start_from=start)
        if start is not None:
            find_start(start, tmp_path, Storage(str(tmp_path))).store(job.run_storage)
        KERAS.run_rank(job, Group(0, 1, CPU), ListClient())
        return job_checkpoints(job).committed()[0].manifest.weights_digest

    assert trained("base", steps=3) != trained("on", start="run:base") != trained("new")
    train_alone(make_job(tmp_path, run="runs/torch", max_steps=1))
    with pytest.raises(CheckpointError, match=r"train\.start_from: run:torch does not fit the model"):
        trained("other", start="run:torch")


def test_to_tf_dataset_starts_an_epoch_with_each_pass(tmp_path: Path) -> None:
    # The last test of the file: with TensorFlow imported, Keras would compute with it in the others.
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is 600 MB; `make frameworks` installs it")

    def shard() -> Shard:
        return session_of(loop_job(tmp_path), 0).shard("train")

    rows = shard()
    pairs = rows.to_tf("image", ["label"], batch_size=50)
    assert pairs.element_spec == (
        tf.TensorSpec((None, 8, 8), tf.float32, "image"),
        {"label": tf.TensorSpec((None,), tf.int64, "label")},
    )
    wanted = shard()
    for _ in range(2):
        given = [(image.numpy(), label["label"].numpy()) for image, label in pairs]
        expected = [(batch["image"], batch["label"]) for batch in wanted.iter_batches(batch_size=50)]
        assert len(given) == len(expected) == 4
        assert all(
            np.array_equal(a, b) for one, two in zip(given, expected, strict=True) for a, b in zip(one, two, strict=True)
        )
    with pytest.raises(ValueError, match="no column named 'pixels'"):
        rows.to_tf("pixels", "label")
    specs = {"feature_type_spec": tf.TensorSpec((None, 8, 8), tf.float64), "label_type_spec": tf.TensorSpec((None,), tf.int32)}
    assert [each.dtype for each in next(iter(rows.to_tf("image", "label", **specs)))] == [tf.float64, tf.int32]
