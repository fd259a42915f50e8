"""Every block's function killed in the middle, and continued by a second attempt. The table is in README.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from tests.guides.running import Killed, Prepared, Ran, checkpoints, killed_and_continued, prepare, reports
from tests.guides.test_cifar import pictures
from tests.guides.test_ingest import messages

INGEST, CIFAR, GUIDE = "ingest_programs.py", "cifar_programs.py", "user_guide_programs.py"


class Case(NamedTuple):
    """A function, and where it is killed: the number, from 1, of a batch of the train split or of a report."""

    function: str
    batch: int = 0
    report: int = 0
    begins: int | None = None
    """Step of the checkpoint that the second attempt continues from."""
    printed: slice = slice(None)
    """Lines of the undisturbed run that are the first ones of the second attempt: it begins with the interrupted epoch."""
    params: Mapping[str, Any] = {}
    train: Mapping[str, Any] = {}

    def killed(self, prepared: Prepared, **more: Any) -> Killed:
        fields = {**self.train, **more}
        name = self.function.partition(":")[2]
        whole, parts = (prepared.job(self.function, self.params, run=f"{name}-{run}", **fields) for run in ("whole", "parts"))
        return Killed(whole, parts, self.batch, self.report)

    def check(self, killed: Killed, first: Ran, end: Ran) -> None:
        assert (first.result.status, end.result.status) == ("finished", "finished")
        assert (end.result.resumed_from_step, first.result.resumed_from_step) == (self.begins, None)
        lines = first.printed[self.printed]
        assert end.printed[: len(lines)] == lines and len(end.printed) == len(first.printed)
        assert [*end.result.returned] == [*first.result.returned]
        # Functions that restore nothing report all again.
        assert len(reports(killed.parts, "report/iteration")) >= len(reports(killed.whole, "report/iteration"))


ALONE = [
    Case(f"{INGEST}:quickstart", batch=2, begins=1),
    Case(f"{INGEST}:over_lines", batch=5, begins=3),
    Case(f"{INGEST}:tokenized", batch=13, begins=10),
    Case(f"{INGEST}:over_both", batch=1),
    Case(f"{INGEST}:numbers", batch=6, begins=4, printed=slice(1, None), params={"options": {"prefetch_batches": 10}}),
    Case(f"{INGEST}:augmented", batch=5, begins=4),
    Case(f"{CIFAR}:with_own_loaders", report=2, begins=1, params={"lr": 1e-3, "epochs": 2, "batch_size_per_worker": 32}),
    Case(f"{GUIDE}:returns", report=4, begins=3, params={"num_epochs": 5}),
    Case(f"{GUIDE}:measured", report=1),
    Case(f"{GUIDE}:reports_losses", report=4, begins=3, train={"checkpoint": {"best": {"metric": "loss", "mode": "min"}}}),
    Case(f"{GUIDE}:over_named_columns", batch=9, begins=7, params={"worker_batch_size": 16, "num_epochs": 4}),
    Case(f"{GUIDE}:by_to_torch", batch=3, begins=2, params={"worker_batch_size": 50, "num_epochs": 2}),
]
ON_TWO = [
    Case(f"{INGEST}:numbers", batch=3, begins=2, printed=slice(1, None), train={"datasets": f"{INGEST}:OwnShards"}),
    Case(f"{GUIDE}:ported_by_hand", report=2, begins=1),
    Case(f"{GUIDE}:ported", report=2, begins=1),
    Case(f"{GUIDE}:reports_numbers", report=3, begins=2, train={"report": {"accuracy": "mean"}}),
    Case(f"{GUIDE}:on_toy_data", report=3, begins=2, printed=slice(0), params={"num_epochs": 4}),
]


def rows(folder: Path) -> Prepared:
    """Numbers under the names that the functions read."""
    numbers = np.arange(140.0)
    table = pa.table({"x": numbers, "y": numbers / 140, "length": numbers, "a": numbers, "b": numbers, "label": numbers / 140})
    return prepare(folder, {"train": table[:100], "validation": table[100:]}, label="label")


@pytest.mark.parametrize("case", ALONE, ids=[case.function.partition(":")[2] for case in ALONE])
def test_killed_function_goes_on_with_the_interrupted_epoch(tmp_path: Path, case: Case) -> None:
    made = (
        messages if "lines" in case.function or "tokenized" in case.function else pictures if CIFAR in case.function else rows
    )
    killed = case.killed(made(tmp_path))
    ((ran,),) = killed_and_continued(killed)
    case.check(killed, *ran)


@pytest.mark.slow
@pytest.mark.drill
def test_functions_killed_on_two_workers_go_on(tmp_path: Path) -> None:
    prepared = rows(tmp_path)
    cases = [case.killed(prepared, workers=2) for case in ON_TWO]
    for ran in killed_and_continued(*cases):
        for case, killed, (first, end) in zip(ON_TWO, cases, ran, strict=True):
            case.check(killed, first, end)
            if case.function.endswith("on_toy_data"):
                assert end.printed == ["begins at 2"]
                ends = [checkpoints(job)[0].manifest for job in (killed.whole, killed.parts)]
                assert (ends[0].weights_digest, ends[0].metrics["loss"]) == (ends[1].weights_digest, ends[1].metrics["loss"])
