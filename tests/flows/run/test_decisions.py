"""Which run a command continues, and what it refuses: pure decisions on records."""

from __future__ import annotations

from typing import Any

from penstock.flows.run.decisions import Continue, NewRun, Past, Refuse, choose_run
from penstock.tasks.keys import StageKey
from penstock.tasks.ledger import Run
from penstock.tasks.stages import STAGES
from penstock.training.spec import TrainSpec
from penstock.training.state import TrainState


def train(**changes: Any) -> dict[str, Any]:
    return TrainSpec(**{"recipe": "m.py:M", "epochs": 2, **changes}).model_dump(mode="json")


def keys(**inputs: dict[str, Any]) -> dict[str, StageKey]:
    return {s: StageKey(stage=s, key=f"{s}{inputs.get(s)}", inputs=inputs.get(s, {})) for s in STAGES}


def run(status: str, spec: dict[str, Any], **inputs: dict[str, Any]) -> Run:
    own = keys(**inputs)
    done = own["train"].key if status == "done" else None
    return Run(run="r", pipeline="p", created="2026", spec={"train": spec}, keys=own, status=status, done_key=done)  # type: ignore[arg-type]


def decide(
    current: Run | None,
    spec: dict[str, Any],
    *,
    checkpoint: bool = True,
    begun: bool = True,
    fresh: bool = False,
    **inputs: Any,
) -> Any:
    reached = TrainState(step=10, epoch=1, position=5) if checkpoint else None
    return choose_run(Past(current, reached, begun) if current else None, spec, keys(**inputs), fresh=fresh)


def test_the_first_run_is_new_and_fresh_always_is() -> None:
    assert isinstance(decide(None, train()), NewRun)
    assert isinstance(decide(run("killed", train()), train(), fresh=True), NewRun)


def test_an_unchanged_run_continues_whatever_its_state() -> None:
    for status in ("running", "killed", "failed", "interrupted", "partial", "done"):
        assert decide(run(status, train()), train()) == Continue(run(status, train()))


def test_more_epochs_continue_a_finished_run() -> None:
    assert isinstance(decide(run("done", train()), train(epochs=9)), Continue)


def test_a_forbidden_change_is_refused_with_both_values() -> None:
    decision = decide(run("killed", train()), train(batch_rows=512))
    assert isinstance(decision, Refuse)
    assert decision.changes == ("train.batch_rows: 256 -> 512",)


def test_changed_data_is_refused_and_the_file_is_named() -> None:
    old = run("killed", train(), read={"files": {"train/a.csv": "1:2"}})
    decision = decide(old, train(), read={"files": {"train/a.csv": "1:2", "train/b.csv": "3:4"}})
    assert isinstance(decision, Refuse)
    assert decision.changes == ("files: added train/b.csv",)


def test_before_the_first_checkpoint_nothing_is_forbidden() -> None:
    assert isinstance(decide(run("killed", train()), train(batch_rows=512), checkpoint=False), Continue)


def test_without_a_checkpoint_another_training_is_another_run_once_there_are_points_to_mix_up() -> None:
    old = run("killed", train(), read={"files": {"a": "1"}}, train={"train.batch_rows": 256})
    same = {"read": {"files": {"a": "1"}}, "train": {"train.batch_rows": 256}}
    assert isinstance(decide(old, train(), checkpoint=False, **same), Continue)
    for changed in ({"read": {"files": {"a": "2"}}}, {"train": {"train.batch_rows": 512}}):
        assert isinstance(decide(old, train(), checkpoint=False, **{**same, **changed}), NewRun)
        assert isinstance(decide(old, train(), checkpoint=False, begun=False, **{**same, **changed}), Continue)


def test_a_changed_learning_rate_goes_on_with_a_warning() -> None:
    decision = decide(run("killed", train()), train(learning_rate=0.5))
    assert isinstance(decision, Continue)
    assert decision.warnings == ("train.learning_rate: 0.001 -> 0.5",)


def test_a_changed_recipe_goes_on_with_a_warning_that_names_the_file() -> None:
    before, after = ({"code.m.py:M": {"m.py": "1", "words.txt": words}, "format": words} for words in "12")
    decision = decide(run("killed", train(), train=before), train(), train=after)
    assert isinstance(decision, Continue)
    assert decision.warnings == ("code.m.py:M: changed words.txt",)


def test_after_the_end_a_real_change_begins_a_new_run() -> None:
    assert isinstance(decide(run("done", train()), train(batch_rows=512)), NewRun)
    assert isinstance(decide(run("done", train()), train(learning_rate=0.5)), NewRun)
    changed = decide(run("done", train(), read={"files": {"a": "1"}}), train(), read={"files": {"a": "2"}})
    assert isinstance(changed, NewRun)
    assert "files: changed a" in changed.reason


def test_after_the_end_a_warn_change_with_more_epochs_goes_on() -> None:
    decision = decide(run("done", train()), train(learning_rate=0.5, epochs=4))
    assert isinstance(decision, Continue)
    assert decision.warnings


def test_a_shorter_training_is_not_what_a_longer_one_left() -> None:
    longer = train(epochs=5)
    refused = decide(run("killed", longer), train(epochs=1))
    assert isinstance(refused, Refuse)
    assert refused.changes == ("train.epochs: 1 ends before the newest checkpoint (epoch 1, step 10)",)
    assert isinstance(decide(run("done", longer), train(epochs=1)), NewRun)
    assert isinstance(decide(run("killed", longer), train(epochs=5, max_steps=9)), Refuse)
    assert isinstance(decide(run("killed", longer), train(epochs=2, max_steps=10)), Continue)


def test_a_part_of_a_run_done_before_leaves_nothing_unfinished() -> None:
    old = run("done", train(), read={"files": {"a": "1"}})
    for status in ("partial", "failed", "killed"):
        again = old.model_copy(update={"status": status})
        assert isinstance(decide(again, train(), read={"files": {"a": "2"}}), NewRun)
    longer = run("killed", train(epochs=5), train={"epochs": 5}).model_copy(update={"done_key": old.done_key})
    assert isinstance(decide(longer, train(epochs=5, batch_rows=512), train={"epochs": 5}), Refuse)
