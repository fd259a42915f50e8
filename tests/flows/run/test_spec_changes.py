"""A pipeline file that changes between attempts, with its real keys: nothing continues from what it changed without a word.

Rows are not prepared: what the stages before training record is made of their keys, so that any change there changes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.flows.run.decisions import Continue, NewRun, Past, Refuse, choose_run
from penstock.flows.spec_file import load_spec
from penstock.tasks.records.keys import StageKey, stage_keys
from penstock.tasks.records.ledger import Run
from penstock.training.state import TrainState
from tests.tasks.records.test_keys import MODEL, make, outputs

REACHED = TrainState(step=10, epoch=1, position=5)

CHANGES: dict[str, tuple[Any, ...]] = {
    "data.label": ("y", "x"),
    "data.validation": ("{fraction: 0.2}", "{fraction: 0.4}"),
    "data.invalid": ("error", "drop"),
    "preprocess": (None, "[{standard_scaler: {columns: [x]}}]"),
    "materialize.unit_bytes": (None, 1000),
    "shuffle.seed": (0, 1),
    "shuffle.mode": ("global", "windowed"),
    "train.epochs": (5, 9),
    "train.max_steps": (None, 50),
    "train.batch_rows": (8, 16),
    "train.accumulate": (1, 2),
    "train.workers": (1, 2),
    "train.precision": ("fp32", "bf16"),
    "train.clip_norm": (None, 1.0),
    "train.learning_rate": (0.001, 0.5),
    "train.params": (None, "{rate: 0.1}"),
    "train.checkpoint.keep": (2, 3),
    "train.checkpoint.best": (None, "{metric: val/loss, mode: min}"),
    "train.callbacks": (None, "[gradient_norm]"),
    "register.alias": ("candidate", "other"),
    "model.py": (MODEL, MODEL + "    def augment(self, batch, generator): return {**batch, 'x': -batch['x']}\n"),
    "rows/a.csv": ("x,y\n1,0\n2,1\n", "x,y\n1,0\n2,0\n"),
}
"""Dotted key or file -> what it may be; None leaves it to its default."""

GOES_ON = {"train.epochs", "train.max_steps"}
"""A later end is what a run goes on to, without a word about it."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("changes"))


def keys_of(file: Path, choice: Mapping[str, Any], *, prepared: bool) -> tuple[dict[str, Any], dict[str, StageKey]]:
    """(train section, keys) of these values."""
    files = {name: value for name, value in choice.items() if "." in name and (file.parent / name).exists()}
    for name, text in files.items():
        (file.parent / name).write_text(text)
    loaded = load_spec(file, [f"{name}={value}" for name, value in choice.items() if name not in files and value is not None])

    def recorded(stage: str, key: str) -> dict[str, Any] | None:
        return outputs(key, train=key, validation=key, test=key)[stage] if prepared else None

    keys = stage_keys(loaded.project, recorded)
    return loaded.spec.train.model_dump(mode="json"), keys


def check(file: Path, attempts: list[dict[str, int]], *, done: bool) -> None:
    """Decide about a run, killed or done, after each of these changes and after going back."""
    choice = {name: values[0] for name, values in CHANGES.items()}
    train, keys = keys_of(file, choice, prepared=True)
    run = Run(run="r", pipeline="p", created="2026", spec={"train": train}, keys=keys, status="killed")
    run = run.model_copy(update={"done_key": keys["train"].key if done else None})
    for picked in [*attempts, {}]:  # the last one goes back to the beginning
        choice = {name: values[picked.get(name, 0)] for name, values in CHANGES.items()}
        decision: Any = None
        for prepared in (False, True):  # before the rows are prepared, and after
            train, now = keys_of(file, choice, prepared=prepared)
            decision = choose_run(Past(run, REACHED, True), train, now, fresh=False)
            if not isinstance(decision, Continue):
                break
        before, after = run.keys["train"], now["train"]
        changed = {name for name in (*before.inputs, *after.inputs) if before.inputs.get(name) != after.inputs.get(name)}
        if isinstance(decision, Continue):
            assert not {name for name in changed if name.startswith("rows.")}, "other rows, or in another order"
            assert bool(changed - GOES_ON) <= bool(decision.warnings), changed
            assert (before.key != after.key) == bool(changed)
            run = run.model_copy(update={"keys": now, "spec": {"train": train}})
        elif run.done_key == before.key:
            assert isinstance(decision, NewRun) and "since then" in decision.reason
        else:
            assert isinstance(decision, Refuse) and decision.changes


@pytest.mark.parametrize("name", CHANGES)
def test_changed_file_never_continues_silently_from_other_key(file: Path, name: str) -> None:
    check(file, [{name: 1}], done=False)
    check(file, [{name: 1}], done=True)


@settings(max_examples=15, deadline=None)
@given(
    done=st.booleans(),
    attempts=st.lists(st.dictionaries(st.sampled_from(sorted(CHANGES)), st.just(1), max_size=2), min_size=2, max_size=3),
)
def test_changed_files_over_several_attempts_are_safe(file: Path, done: bool, attempts: list[dict[str, int]]) -> None:
    check(file, attempts, done=done)
