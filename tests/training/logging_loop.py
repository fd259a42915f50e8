"""A loop that charts values of its own beside its reports. Captured, never imported."""

import tempfile
from pathlib import Path

import ray.train

import penstock


def logs(config):
    for number, score in enumerate(config["scores"]):
        penstock.log("from_penstock", number)
        penstock.log("from_penstock", number + 2)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "score.txt").write_text(str(score))
            ray.train.report({"score": score}, checkpoint=ray.train.Checkpoint.from_directory(folder))
