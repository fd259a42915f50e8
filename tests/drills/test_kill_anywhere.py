"""Kill -9 at a dozen moments of one run, in every stage, a worker and a checkpoint's write: no bit of the weights changes."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drills.project import Command, make_project

pytestmark = [pytest.mark.slow, pytest.mark.drill]

EPOCHS = 8
STEPS_PER_EPOCH = 23
PAUSED = ["--set", "train.params={pause_s: 0.03}"]
"""A pause in every step gives the kills room; both runs have it, since params are part of the model's identity."""


def wait_for(seen: Callable[[], bool], command: Command, what: str, timeout_s: float = 180) -> None:
    deadline = time.monotonic() + timeout_s
    while not seen():
        if command.process.poll() is not None:
            _, err = command.process.communicate()
            raise AssertionError(f"the run ended before {what}:\n{err[-4000:]}")
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.005)


def committed_steps(storage: Path) -> list[int]:
    return sorted(int(path.parent.name.split("-")[1]) for path in storage.glob("runs/*/checkpoints/*/manifest.json"))


def write_in_progress(storage: Path) -> bool:
    folders = storage.glob("runs/*/checkpoints/*")
    return any(folder.is_dir() and any(folder.iterdir()) and not (folder / "manifest.json").exists() for folder in folders)


def train_workers(storage: Path) -> list[int]:
    newest = max(storage.glob("runs/*/attempts/*.json"))
    return [int(place.rsplit(":", 1)[1]) for place in json.loads(newest.read_text())["workers"].values()]


def test_a_dozen_kills_change_no_bit(tmp_path: Path) -> None:
    calm = make_project(tmp_path / "calm", epochs=EPOCHS)
    undisturbed = Command("run", str(calm), "--json", *PAUSED).finish()

    file = make_project(tmp_path / "drill", epochs=EPOCHS)
    storage = file.parent / ".penstock"
    pick = random.Random(20261121)

    def record(stage: str) -> Callable[[], bool]:
        return lambda: any(storage.glob(f"stages/{stage}/*.json"))

    def beyond(step: int) -> Callable[[], bool]:
        return lambda: max(committed_steps(storage), default=0) >= step

    moments: list[tuple[str, Callable[[], bool]]] = [
        ("the read record", record("read")),
        ("the preprocess record", record("preprocess")),
        ("the first committed unit", lambda: len(list(storage.glob("units/*/unit.json"))) >= 1),
        ("the third committed unit", lambda: len(list(storage.glob("units/*/unit.json"))) >= 3),
        ("the materialize record", record("materialize")),
        ("the shuffle record", record("shuffle")),
        ("a first checkpoint", beyond(1)),
        ("a second kill in the same epoch", beyond(12)),
        ("a checkpoint being written", lambda: beyond(20)() and write_in_progress(storage)),
        ("the third epoch", beyond(2 * STEPS_PER_EPOCH + pick.randrange(1, 15))),
        ("another checkpoint being written", lambda: beyond(80)() and write_in_progress(storage)),
        ("the sixth epoch", beyond(5 * STEPS_PER_EPOCH + pick.randrange(1, 15))),
    ]
    for what, moment in moments:
        command = Command("run", str(file), "--json", *PAUSED)
        wait_for(moment, command, what)
        command.kill()

    # One worker dies under a living driver: Ray restarts the group, and the same attempt goes on.
    command = Command("run", str(file), "--json", *PAUSED)
    wait_for(beyond(6 * STEPS_PER_EPOCH + 5), command, "the seventh epoch")
    victims = train_workers(storage)
    assert len(victims) == 2
    os.kill(pick.choice(victims), signal.SIGKILL)
    survived = command.finish()

    assert survived["attempt"] == len(moments) + 1
    assert survived["exactness"] == "bit-exact"
    assert survived["weights_digest"] == undisturbed["weights_digest"]
    again = Command("run", str(file), "--json", *PAUSED).finish()
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    assert again["model_uri"] == survived["model_uri"]
    assert again["weights_digest"] == survived["weights_digest"]
