"""Does a training begin with the weights that `start_from` names, and say which fit, which are new and which were left?"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from penstock.errors import CheckpointError, SpecError, TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint.folder import fetch_folder
from penstock.training.checkpoint.manifest import CheckpointFacts
from penstock.training.checkpoint.matching import start_weights
from penstock.training.checkpoint.start_from import START, find_start
from penstock.training.checkpoint.state_files import weights_of
from penstock.training.checkpoint.store import CheckpointStore, Placed, Snapshot
from penstock.training.events import Notice
from tests.training.digits import ListClient, make_job, train_alone


def weights(folder: Path, run: str) -> dict[str, torch.Tensor]:
    checkpoint, _ = CheckpointStore(Storage(str(folder / run))).newest_valid()
    assert checkpoint is not None
    return weights_of(checkpoint.storage)


def test_fitting_weights_are_taken_and_others_named(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, run="runs/base", max_steps=5))
    start = find_start("run:base", tmp_path, Storage(str(tmp_path)))
    base = {**safetensors.torch.load(start.read()), "old.weight": torch.zeros(2)}
    del base["head.bias"]
    torch.save({"state_dict": base}, tmp_path / "base.pt")
    found = find_start("base.pt", tmp_path, Storage(str(tmp_path)))
    job = make_job(tmp_path, max_steps=1, start_from="base.pt", learning_rate=1e-9)
    job.run_storage.write_bytes(START, found.read())
    client = ListClient()
    train_alone(job, client)
    (notice,) = [event.message for event in client.events if isinstance(event, Notice)]
    whole = len(weights(tmp_path, "run"))
    assert notice == f"{whole - 1} of {whole} weights are those of base.pt; new: head.bias; left: old.weight"
    assert torch.allclose(weights(tmp_path, "run")["head.weight"], base["head.weight"], atol=1e-6)
    client = ListClient()
    train_alone(make_job(tmp_path, attempt=2, start_from="base.pt"), client)  # continues from the checkpoint
    assert not [event for event in client.events if isinstance(event, Notice)]

    safetensors.torch.save_file(dict(base), tmp_path / "same.safetensors")
    other = find_start("same.safetensors", tmp_path, Storage(str(tmp_path)))
    assert other.digest != found.digest
    (tmp_path / "copy.safetensors").write_bytes(other.read())
    assert find_start("copy.safetensors", tmp_path, Storage(str(tmp_path))).digest == other.digest


def test_folder_of_best_checkpoint_has_its_own_files(tmp_path: Path) -> None:
    store = CheckpointStore(Storage(str(tmp_path)).child("runs/r"))
    for step, loss in ((1, 0.1), (2, 0.5)):
        (file := tmp_path / f"model-{step}.pt").write_text(f"weights {step}")
        placed = Placed(name := store.new_name(step), store.place(name, {f"folder/{file.name}": file}))
        settings = {"train.checkpoint.best": {"metric": "loss", "mode": "min"}}
        facts = CheckpointFacts(step=step, epoch=1, position=0, world_size=1, settings=settings, metrics={"loss": loss})
        store.write(Snapshot(facts, {}, lambda: "0" * 32, placed))
    fetch = find_start("run:r", tmp_path, Storage(str(tmp_path)), whole=True).fetch
    assert fetch is not None
    fetch(tmp_path / "into")
    assert {path.name: path.read_text() for path in (tmp_path / "into").iterdir()} == {"model-1.pt": "weights 1"}


def test_folder_in_a_folder_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "begin/folder").mkdir(parents=True)
    (tmp_path / "begin/w.pt").write_text("outer")
    (tmp_path / "begin/folder/w.pt").write_text("inner")
    find_start("begin", tmp_path, Storage(str(tmp_path)), whole=True).store(there := Storage(str(tmp_path / "run")))
    fetch_folder(there.child(START), there.child(START).tree(), into := tmp_path / "into")
    assert [(into / name).read_text() for name in ("w.pt", "folder/w.pt")] == ["outer", "inner"]


@pytest.mark.parametrize("whole", [False, True])
def test_damaged_weights_of_a_run_are_refused(tmp_path: Path, whole: bool) -> None:
    train_alone(job := make_job(tmp_path, run="runs/base", max_steps=1))
    path = CheckpointStore(job.run_storage).committed()[0].storage.local_path("model.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    start = find_start("run:base", tmp_path, Storage(str(tmp_path)), whole=whole)
    with pytest.raises(CheckpointError, match=r"the content of .*model\.safetensors does not match the manifest's hash"):
        start.store(Storage(str(tmp_path / "new")))


def test_run_of_another_framework_names_both(tmp_path: Path) -> None:
    store = CheckpointStore(Storage(str(tmp_path)).child("runs/trees"))
    (file := tmp_path / "model.ubj").write_text("trees")
    placed = Placed(name := store.new_name(1), store.place(name, {file.name: file}))
    store.write(Snapshot(CheckpointFacts(step=1, epoch=1, position=0, world_size=1), {}, lambda: "0" * 32, placed))
    Storage(str(tmp_path)).write_json("runs/trees/run.json", {"spec": {"train": {"framework": "xgboost"}}})
    with pytest.raises(SpecError, match=r"run:trees was trained with train\.framework: xgboost, and .*: lightning,") as refused:
        find_start("run:trees", tmp_path, Storage(str(tmp_path)), framework="lightning")
    assert refused.value.next_step.startswith("name a run or a model of lightning (penstock status lists the runs), or set ")


def test_unusable_start_is_refused(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    for name in ("none.safetensors", "run:none"):
        with pytest.raises(SpecError, match=r"train\.start_from"):
            find_start(name, tmp_path, storage)
    storage.write_bytes(START, b"no weights")
    with pytest.raises(CheckpointError, match="cannot be read"):
        start_weights(storage)
    job = make_job(tmp_path, start_from="other.safetensors")
    job.run_storage.write_bytes(START, safetensors.torch.save({"x": torch.zeros(1)}))
    with pytest.raises(TrainingError, match="none of the 1 weights"):
        train_alone(job)
