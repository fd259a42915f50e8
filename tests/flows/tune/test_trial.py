"""Do trials share equal rows, and do their lines name them?"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.flows.run.reporter import PlainReporter
from penstock.flows.spec_file import load_spec
from penstock.flows.tune.space import load_trial
from penstock.flows.tune.sweep import Sweep
from penstock.flows.tune.trial import _TrialReporter, _with_rows
from penstock.ingest.ray_tasks import local_map
from penstock.machine.stopping import StopRequest
from penstock.tasks import materialize, preprocess
from penstock.tasks.context import RunContext
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Ledger
from tests.drills.project import make_project


class Unheard:
    """A tracker that takes everything."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_, **__: None


def test_equal_rows_are_prepared_once_for_all_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "fit_preprocess", partial(preprocess.fit_preprocess, parallel=local_map))
    prepares, keys_made = partial(materialize.materialize_dataset, parallel=local_map), list[str]()

    def counted(*arguments: Any, **more: Any) -> Any:
        keys_made.append(more["key"])
        return prepares(*arguments, **more)

    monkeypatch.setattr(materialize, "materialize_dataset", counted)
    loaded = load_spec(make_project(tmp_path / "p", files=1))
    project = loaded.project
    ledger = Ledger(project.storage)
    run = ledger.new_run("drill", {})
    ctx = RunContext(
        project=project,
        keys=stage_keys(project, ledger.stage_output),
        ledger=ledger,
        run=run,
        attempt=ledger.new_attempt(run.run),
        tracker=cast("Any", Unheard()),
        reporter=PlainReporter(),
        state_dir=tmp_path,
        need_ray=lambda: True,
        stopping=StopRequest(),
    )
    sweep = cast("Sweep", SimpleNamespace(ctx=ctx, prepared={}, preparing=threading.Lock()))

    def rows(**values: Any) -> RunContext:
        spec = load_trial(loaded, {key.replace("__", "."): value for key, value in values.items()})
        return _with_rows(sweep, spec.project, cast("Any", PlainReporter()))

    whole = rows(train__learning_rate=0.1)
    assert rows(train__learning_rate=0.2) is whole
    fewer = rows(data__validation__fraction=0.5, train__learning_rate=0.1)
    assert rows(data__validation__fraction=0.5, train__learning_rate=0.2) is fewer
    assert whole.manifest.rows["train"] > fewer.manifest.rows["train"]
    other_order = rows(shuffle__seed=6)
    assert other_order is not whole and other_order.outcomes["materialize"].outcome == "reused"
    assert keys_made == [whole.manifest.key, fewer.manifest.key]


def test_lines_of_a_trial_carry_its_number() -> None:
    told: list[str] = []
    sweep: Any = SimpleNamespace(shared_lines={"on CPUs"}, line=lambda number, text: told.append(f"trial {number}{text}"))
    reporter = _TrialReporter(sweep, 3)
    reporter.report("train: rank 1: hello")
    reporter.report("train: on CPUs")
    reporter.report("drill: run r, attempt 1")
    reporter.warn("train: a worker was lost")
    assert told == ["trial 3: train: rank 1: hello", "trial 3: train: a worker was lost"]
