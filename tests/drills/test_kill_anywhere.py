"""Kill -9 of one run, in every stage, of a worker, in a checkpoint's write; SIGTERM; a damaged checkpoint. No bit changes."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tests.drills.project import make_project
from tests.runs.forked import Command
from tests.shared import CALM_EPOCHS, CALM_FILES, make_lone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SLOW_S = 0.1
"""For attempts that are killed: a step takes its time, for a killed driver's workers live on until Ray ends them."""
RESTARTED = "; all are started again (restart 1 of 5)\n"


class Drill:
    """A run of so many workers that is killed again and again, seen through its storage."""

    def __init__(self, file: Path, prefect_url: str, workers: int) -> None:
        self.file, self.count = file, workers
        self.storage = file.parent / ".penstock"
        self.environment = {"PREFECT_API_URL": prefect_url}
        self.slow = {"DRILL_PAUSE_S": str(SLOW_S)}
        self.command = self.run(slow=True)
        self.epochs_at_kill: list[int] = []

    def run(self, *, slow: bool) -> Command:
        environment = {**self.environment, **(self.slow if slow else {})}
        return Command("run", str(self.file), "--json", environment=environment)

    def start_again(self, *, slow: bool = True) -> None:
        begun = len(self.attempts())
        self.command = self.run(slow=slow)
        self.wait_for("another attempt", lambda: len(self.attempts()) > begun)

    def attempts(self) -> list[Path]:
        return sorted(self.storage.glob("runs/*/attempts/*.json"))

    def wait_for(self, what: str, seen: Callable[[], bool], every_s: float = 0.02) -> None:
        self.command.wait_for(what, seen, every_s=every_s)

    def recorded(self, stage: str) -> Callable[[], bool]:
        return lambda: any(self.storage.glob(f"stages/{stage}/*.json"))

    def recorded_by_the_run(self, stage: str) -> Callable[[], bool]:
        return lambda: any(self.storage.glob(f"runs/*/stages/{stage}.json"))

    def units(self, count: int) -> Callable[[], bool]:
        return lambda: len(list(self.storage.glob("units/*/unit.json"))) >= count

    def manifests(self) -> list[Path]:
        return sorted(self.storage.glob("runs/*/checkpoints/*/manifest.json"))

    def folders(self) -> set[Path]:
        return set(self.storage.glob("runs/*/checkpoints/*"))

    def workers(self) -> dict[str, int]:
        """Rank -> pid of the newest attempt's workers."""
        newest = self.attempts()[-1]
        return {rank: int(place.rsplit(":", 1)[1]) for rank, place in json.loads(newest.read_text())["workers"].items()}

    def wait_for_training(self, steps: int) -> None:
        """Wait until this attempt's own workers have committed a checkpoint so many steps beyond where they began."""
        self.wait_for("workers to start", lambda: len(self.workers()) == self.count)
        begun = self.step()
        self.wait_for(f"{steps} steps beyond {begun}", lambda: self.step() >= begun + steps)

    def step(self) -> int:
        return max((int(path.parent.name.split("-")[1]) for path in self.manifests()), default=0)

    def mlflow_status(self, result: dict[str, Any]) -> str:
        client = MlflowClient(f"sqlite:///{self.storage}/mlflow/mlflow.db")
        return str(client.get_run(result["mlflow_run_id"]).info.status)

    def kill_driver(self) -> None:
        manifests = self.manifests()
        if manifests:
            self.epochs_at_kill.append(json.loads(manifests[-1].read_text())["epoch"])
        self.command.kill()

    def kill_in_a_checkpoint_write(self) -> None:
        """Kill the writing rank while a checkpoint's folder has no manifest yet."""
        self.wait_for_training(5)
        old = self.folders()
        half_written = lambda: [f for f in self.folders() - old if any(f.iterdir()) and not (f / "manifest.json").exists()]  # noqa: E731
        self.wait_for("a checkpoint being written", lambda: bool(half_written()), every_s=0.002)
        os.kill(self.workers()["0"], signal.SIGKILL)

    def wait_for_restart(self) -> None:
        """Wait until Ray has started the workers again under the living driver, and they have trained on."""
        self.wait_for("the restart", lambda: RESTARTED in self.command.said)
        begun = self.step()
        self.wait_for("more steps", lambda: self.step() > begun)


def test_two_kills_a_sigterm_and_a_damaged_checkpoint_change_no_bit(
    tmp_path: Path, calm: dict[str, Any], prefect_url: str
) -> None:
    drill = Drill(make_project(tmp_path / "drill", epochs=CALM_EPOCHS, files=CALM_FILES, workers=2), prefect_url, workers=2)
    drill.wait_for("the first committed unit", drill.units(1))
    drill.kill_driver()
    drill.start_again()
    drill.kill_in_a_checkpoint_write()  # of one worker: Ray restarts the group, and the same attempt goes on
    drill.wait_for_restart()
    os.kill(drill.command.process.pid, signal.SIGTERM)
    stopped = drill.command.finish(code=143)
    assert stopped["status"] == "interrupted"
    assert "train: stopping; what is trained so far is saved first, a second signal stops at once\n" in drill.command.said
    assert drill.command.said.strip().splitlines()[-1] == f"continue with: penstock run {drill.file}"
    assert drill.mlflow_status(stopped) == "KILLED"

    newest = drill.storage / "runs" / stopped["run"] / "checkpoints" / stopped["checkpoint"] / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    finished = drill.run(slow=False).finish()
    (warning,) = finished["warnings"]
    assert warning.startswith(f"train: checkpoint {stopped['checkpoint']} is damaged (the content of model.safetensors")
    assert "trained again" in warning
    assert (finished["attempt"], finished["exactness"]) == (3, "bit-exact")
    assert finished["weights_digest"] == calm["weights_digest"]
    assert finished["metrics"] == calm["metrics"]
    assert finished["mlflow_run_id"] == stopped["mlflow_run_id"]
    assert drill.mlflow_status(finished) == "FINISHED"


@pytest.mark.drill
def test_kills_in_every_stage_change_no_bit(tmp_path: Path, lone: dict[str, Any], prefect_url: str) -> None:
    drill = Drill(make_lone(tmp_path / "drill"), prefect_url, workers=1)
    before_training: list[tuple[str, Callable[[], bool]]] = [
        ("the read record", drill.recorded("read")),
        ("the third committed unit", drill.units(3)),
        ("the shuffle record", drill.recorded("shuffle")),
    ]
    kills = 0
    for what, seen in before_training:
        drill.wait_for(what, seen)
        drill.kill_driver()
        kills += 1
        drill.start_again()
    drill.kill_in_a_checkpoint_write()
    drill.kill_driver()
    kills += 1
    drill.start_again()
    # The worker dies under a living driver: Ray starts it again, and the same attempt goes on.
    drill.wait_for_training(5)
    os.kill(drill.workers()["0"], signal.SIGKILL)
    drill.wait_for_restart()
    drill.kill_driver()
    kills += 1
    drill.start_again(slow=False)
    for before in ("train", "evaluate"):  # the next stage has begun, and it is the last but one, and the last
        drill.wait_for(f"the {before} record", drill.recorded_by_the_run(before))
        drill.command.kill()
        kills += 1
        drill.start_again(slow=False)
    survived = drill.command.finish()

    assert max(Counter(drill.epochs_at_kill).values()) >= 2, "two kills within one epoch"
    assert survived["attempt"] == kills + 1
    assert survived["exactness"] == "bit-exact"
    assert survived["weights_digest"] == lone["weights_digest"]
    assert survived["metrics"] == lone["metrics"]
    again = drill.run(slow=False).finish()
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    assert again["model_uri"] == survived["model_uri"]
    assert again["weights_digest"] == survived["weights_digest"]
