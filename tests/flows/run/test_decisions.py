"""Which run a command continues, and what it refuses: pure decisions on records."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import OnResume, resume_rules
from penstock.flows.run.decisions import Continue, NewRun, Past, Refuse, choose_run, differences
from penstock.storage import Storage
from penstock.tasks.records.keys import StageKey
from penstock.tasks.records.ledger import Ledger, Run
from penstock.tasks.stages import STAGES
from penstock.training.spec import TrainSpec
from penstock.training.state import TrainState


def train(**changes: Any) -> dict[str, Any]:
    return TrainSpec(**{"recipe": "m.py:M", "epochs": 2, **changes}).model_dump(mode="json")


def keys(known: bool = True, **inputs: dict[str, Any]) -> dict[str, StageKey]:
    """Keys of these inputs; the rows of training are made from the train files."""
    files = inputs.get("read", {}).get("files", {})
    rows = {"rows.train": str([file for file in files.items() if file[0].startswith("train/")])} if known else {}
    inputs = {**inputs, "train": inputs.get("train", {}) | rows}
    found = {s: StageKey(stage=s, key=f"{s}{inputs.get(s)}", inputs=inputs.get(s, {})) for s in STAGES}
    after = STAGES[STAGES.index("train") :]
    return found if known else found | {s: found[s].model_copy(update={"key": ""}) for s in after}


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
    known: bool = True,
    same: Run | None = None,
    **inputs: Any,
) -> Any:
    reached = TrainState(step=10, epoch=1, position=5) if checkpoint else None
    past = Past(current, reached, begun) if current else None
    return choose_run(past, spec, keys(known, **inputs), fresh=fresh, same=same)


def test_first_run_and_fresh_are_new_runs() -> None:
    assert isinstance(decide(None, train()), NewRun)
    assert isinstance(decide(run("killed", train()), train(), fresh=True), NewRun)


def test_unchanged_run_continues_in_any_state() -> None:
    for status in ("running", "killed", "failed", "interrupted", "partial", "done"):
        assert decide(run(status, train()), train()) == Continue(run(status, train()))


def test_more_epochs_continue_a_finished_run() -> None:
    assert isinstance(decide(run("done", train()), train(epochs=9)), Continue)


def test_more_epochs_in_params_continue_a_finished_loop() -> None:
    def loop(**params: Any) -> dict[str, Any]:
        return TrainSpec(loop="m.py:f", params={"lr": 0.1, **params}).model_dump(mode="json")

    decision = decide(run("done", loop(epochs=1)), loop(epochs=2))
    assert isinstance(decision, Continue) and decision.warnings == ("train.params.epochs: 1 -> 2",)
    for changed in (loop(epochs=0), loop(epochs=2, lr=0.2), loop(epochs=1, hidden=2), loop(epochs="2")):
        assert isinstance(decide(run("done", loop(epochs=1)), changed), NewRun)
    assert isinstance(decide(run("done", train(params={"epochs": 1})), train(params={"epochs": 2})), NewRun)


def test_forbidden_change_is_refused_with_both_values() -> None:
    decision = decide(run("killed", train()), train(batch_rows=512))
    assert isinstance(decision, Refuse)
    assert decision.changes == ("train.batch_rows: 256 -> 512",)


def test_changed_data_is_refused_naming_file() -> None:
    old = run("killed", train(), read={"files": {"train/a.csv": "1:2"}})
    decision = decide(old, train(), read={"files": {"train/a.csv": "1:2", "train/b.csv": "3:4"}})
    assert isinstance(decision, Refuse)
    assert decision.changes == ("files: added train/b.csv",)


def test_any_change_before_first_checkpoint_continues() -> None:
    assert isinstance(decide(run("killed", train()), train(batch_rows=512), checkpoint=False), Continue)


def test_changed_training_with_points_but_no_checkpoint_is_new_run() -> None:
    old = run("killed", train(), read={"files": {"train/a": "1"}}, train={"train.batch_rows": 256})
    same = {"read": {"files": {"train/a": "1"}}, "train": {"train.batch_rows": 256}}
    assert isinstance(decide(old, train(), checkpoint=False, **same), Continue)
    for changed in ({"read": {"files": {"train/a": "2"}}}, {"train": {"train.batch_rows": 512}}):
        assert isinstance(decide(old, train(), checkpoint=False, **{**same, **changed}), NewRun)
        assert isinstance(decide(old, train(), checkpoint=False, begun=False, **{**same, **changed}), Continue)


def test_changed_learning_rate_continues_with_warning() -> None:
    decision = decide(run("killed", train()), train(learning_rate=0.5))
    assert isinstance(decision, Continue)
    assert decision.warnings == ("train.learning_rate: 0.001 -> 0.5",)


def test_changed_params_continue_and_are_named() -> None:
    then, now = ({"rate": rate, "sizes": {"hidden": 8, "out": out}, "same": 1} for rate, out in ((0.1, 2), (None, 3)))
    decision = decide(run("killed", train(params=then)), train(params=now))
    assert isinstance(decision, Continue)
    assert decision.warnings == ("train.params.rate: 0.1 -> None", "train.params.sizes.out: 2 -> 3")


def test_changed_recipe_continues_with_warning_naming_file() -> None:
    before, after = ({"code.m.py:M": {"m.py": "1", "words.txt": words}, "format": words} for words in "12")
    decision = decide(run("killed", train(), train=before), train(), train=after)
    assert isinstance(decision, Continue)
    assert decision.warnings == ("code: changed words.txt",)


def test_new_best_is_the_reason_not_its_rows() -> None:
    best, rows = {"best": {"metric": "val/loss"}}, {"rows.validation": "1"}
    decision = decide(run("done", train()), train(checkpoint=best), train=rows)
    assert isinstance(decision, NewRun) and "since then train.checkpoint.best: None -> " in decision.reason
    refused = decide(run("killed", train()), train(checkpoint=best), train=rows)
    assert isinstance(refused, Refuse) and refused.changes[0].startswith("train.checkpoint.best: None -> ")
    refused = decide(run("killed", train(), train=rows), train(), train={"rows.validation": "2"})
    assert isinstance(refused, Refuse) and refused.changes == ("rows.validation: 1 -> 2",)


def test_definition_of_two_targets_is_named_once() -> None:
    before, after = ({f"code.{name}": {"m.py:M": version} for name in ("m.py:M", "c.py:C")} for version in "12")
    decision = decide(run("killed", train(), train=before), train(), train=after)
    assert isinstance(decision, Continue) and decision.warnings == ("code: changed m.py:M",)


def test_forbidden_change_after_done_begins_new_run() -> None:
    assert isinstance(decide(run("done", train()), train(batch_rows=512)), NewRun)
    assert isinstance(decide(run("done", train()), train(learning_rate=0.5)), NewRun)
    changed = decide(run("done", train(), read={"files": {"train/a": "1"}}), train(), read={"files": {"train/a": "2"}})
    assert isinstance(changed, NewRun)
    assert "files: changed train/a" in changed.reason


@pytest.mark.parametrize(("status", "then"), [("done", NewRun), ("killed", Refuse)])
def test_changed_start_weights_change_training(status: str, then: type) -> None:
    spec, before, after = train(start_from="models:/m@champion"), {"start_from": "1" * 32}, {"start_from": "2" * 32}
    assert isinstance(decide(run(status, spec, train=before), spec, train=before), Continue)
    decision = decide(run(status, spec, train=before), spec, train=after)
    assert isinstance(decision, then) and "train.start_from names other weights: 11111111 -> 22222222" in str(decision)


@pytest.mark.parametrize("other", [{"learning_rate": 0.5}, {"params": {"hidden": 16}}])
def test_more_epochs_and_another_change_begin_a_new_run(other: dict[str, Any]) -> None:
    decision = decide(run("done", train()), train(epochs=4, **other))
    assert isinstance(decision, NewRun) and next(iter(other)) in decision.reason


def test_fewer_epochs_than_trained_are_refused() -> None:
    longer = train(epochs=5)
    refused = decide(run("killed", longer), train(epochs=1))
    assert isinstance(refused, Refuse)
    assert refused.changes == ("train.epochs: 1 ends before the newest checkpoint (epoch 1, step 10)",)
    assert isinstance(decide(run("done", longer), train(epochs=1)), NewRun)
    assert isinstance(decide(run("killed", longer), train(epochs=5, max_steps=9)), Refuse)
    assert isinstance(decide(run("killed", longer), train(epochs=2, max_steps=10)), Continue)


def test_killed_ray_function_continues_whatever_its_epochs() -> None:
    loop = train(recipe="m.py:train_func", loop="m.py:train_func", epochs=1)
    decision = decide(run("killed", loop), loop)
    assert isinstance(decision, Continue), decision


def test_later_attempt_keeps_run_finished() -> None:
    old = run("done", train(), read={"files": {"train/a": "1"}})
    for status in ("partial", "failed", "killed"):
        again = old.model_copy(update={"status": status})
        assert isinstance(decide(again, train(), read={"files": {"train/a": "2"}}), NewRun)
    longer = run("killed", train(epochs=5), train={"epochs": 5}).model_copy(update={"done_key": old.done_key})
    assert isinstance(decide(longer, train(epochs=5, batch_rows=512), train={"epochs": 5}), Refuse)


TEST_FILES = (
    {"files": {"train/a": "1", "test/b": "1"}, "version.pyarrow": "25.0.0"},
    {"files": {"train/a": "1", "test/b": "2"}},
)


@pytest.mark.parametrize("status", ["killed", "done"])
@pytest.mark.parametrize("known", [True, False])
def test_changed_held_out_row_or_patch_release_keeps_training(status: str, known: bool) -> None:
    before, after = TEST_FILES
    old = run(status, train(), read=before)
    assert decide(old, train(), known=known, read=after) == Continue(old)


def test_changed_train_files_or_rows_are_refused() -> None:
    before, after = TEST_FILES
    old = run("killed", train(), read=before)
    assert isinstance(decide(old, train(), known=False, read={"files": {"train/a": "2"}}), Refuse)
    rows = keys(read=before) | {"train": StageKey(stage="train", key="k", inputs={"rows.train": "others"})}
    rows["read"] = keys(read=after)["read"]
    refused = choose_run(Past(old, TrainState(step=10, epoch=1, position=5), True), train(), rows, fresh=False)
    assert refused == Refuse(old, ("files: changed test/b", "version.pyarrow: 25.0.0 -> (none)"))


@pytest.mark.parametrize("rule", [{"data.test.by": "day"}, {"data.validation.fraction": 0.2}])
def test_prepared_rows_decide_where_a_rule_holds_rows_out(rule: dict[str, Any]) -> None:
    before, after = ({**rule, "files": {"train/a": "1", **added}} for added in ({}, {"train/b": "1"}))
    old = run("killed", train(), read=before)
    assert decide(old, train(), known=False, read=after) == Continue(old)
    assert isinstance(decide(old, train(), known=False, read={**after, "data.test.after": "2026"}), Refuse)
    assert decide(old, train(), read=after) == Refuse(old, ("files: added train/b",))
    assert isinstance(decide(run("done", train(), read=before), train(), known=False, read=after), NewRun)
    assert differences(old, keys(False, read=after)), "another process is not waited for"


def test_return_to_earlier_training_continues_its_run() -> None:
    a, b = run("done", train()), run("killed", train(batch_rows=512)).model_copy(update={"run": "b"})
    assert decide(b, train(), same=a) == Continue(a)
    assert isinstance(decide(b, train(), same=a, fresh=True), NewRun)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("xyz"), st.sampled_from((0.1, 0.2)), st.booleans()), max_size=8)
)
def test_no_steps_are_trained_twice(commands: list[tuple[str, str, float, bool]]) -> None:
    """Commands as the flow performs them: decide, prepare, decide again where the rows were not known, train to the end."""
    storage = Storage(f"memory://decisions-{uuid.uuid4()}")  # of its own: hypothesis calls this again and again
    ledger, prepared, trained = Ledger(storage), set[str](), list[str]()
    for train_file, test_file, rate, whole in commands:
        inputs = {"read": {"files": {"train/1": train_file, "test/1": test_file}}, "train": {"train.learning_rate": rate}}
        spec = train(learning_rate=rate)
        while True:
            now = keys(train_file + test_file in prepared, **inputs)
            current = ledger.current_run("p")
            trained_here = TrainState(step=10, epoch=2, position=0) if current is not None and current.done_key else None
            past = Past(current, trained_here, trained_here is not None) if current is not None else None
            same = ledger.run_with_training("p", now["train"].key) if now["train"].key else None
            decision = choose_run(past, spec, now, fresh=False, same=same)
            assert not isinstance(decision, Refuse)
            number = sum(1 for _ in ledger.runs())
            attempt = (
                decision.run if isinstance(decision, Continue) else Run(run=str(number), pipeline="p", created="", spec={})
            )
            known = {name: key if key.key else attempt.keys.get(name, key) for name, key in now.items()}
            attempt = attempt.model_copy(update={"keys": known, "spec": {"train": spec}})
            ledger.save_run(attempt)
            ledger.make_current(attempt)
            if train_file + test_file in prepared:
                break
            prepared.add(train_file + test_file)
        if whole and attempt.done_key != now["train"].key:
            trained.append(now["train"].key)
            ledger.save_run(attempt.model_copy(update={"done_key": now["train"].key}))
    assert len(trained) == len(set(trained))


VALUES: dict[str, tuple[Any, ...]] = {
    "epochs": (1, 2, 9),
    "max_steps": (None, 9, 10, 50),
    "batch_rows": (256, 512),
    "last_batch": ("keep", "drop"),
    "accumulate": (1, 2),
    "workers": (1, 2),
    "gpus": ("auto", 0),
    "cpus_per_worker": (1, 2),
    "precision": ("fp32", "bf16"),
    "compile": (False, True),
    "clip_norm": (None, 1.0),
    "learning_rate": (0.001, 0.5),
    "params": ({}, {"rate": 0.1}),
    "start_from": (None, "models:/m/1"),
    "validate_every_steps": (None, 5),
    "retries": (3, 5),
    "wait_s": (600, 60),
    "checkpoint.every_steps": (None, 7),
    "checkpoint.every_s": (60.0, None),
    "checkpoint.every_epoch": (True, False),
    "checkpoint.keep": (2, 4),
    "checkpoint.keep_best": (1,),
    "stall_s": (120.0, 30.0),
    "backend.name": (None, "gloo"),
    "backend.timeout_s": (900, 60),
    "backend.init_method": ("env", "tcp"),
    "resources": ({}, {"tape": 1.0}),
    "placement": ("PACK", "SPREAD"),
    "checkpoint.best": (None, {"metric": "val/loss", "mode": "min"}),
}
"""Of every field but those that name code or a framework, which other tests change: the default first, or near it."""

LIMITS = {"train.epochs", "train.max_steps"}

ELSEWHERE = {"recipe", "framework", "loop", "datasets", "callbacks", "report"}


def spec_of(choice: dict[str, Any]) -> dict[str, Any]:
    """A train section with these values by dotted path."""
    nested: dict[str, Any] = {"checkpoint": {}}
    for path, value in choice.items():
        *above, name = path.split(".")
        (nested.setdefault(above[0], {}) if above else nested)[name] = value
    return train(**nested)


def test_all_fields_with_resume_rules_are_tried() -> None:
    assert {path for path, _ in resume_rules(TrainSpec)} - VALUES.keys() == ELSEWHERE


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["killed", "done"]),
    st.lists(st.lists(st.tuples(st.sampled_from(sorted(VALUES)), st.integers(0, 3)), max_size=4), min_size=1, max_size=5),
)
def test_resume_tags_decide_for_any_field_change(status: str, attempts: list[list[tuple[str, int]]]) -> None:
    rules = dict(resume_rules(TrainSpec))
    choice = {path: values[-1] if path in ("epochs", "max_steps") else values[0] for path, values in VALUES.items()}
    for picked in attempts:
        now = choice | {path: VALUES[path][number % len(VALUES[path])] for path, number in picked}
        changed = {rule: {f"train.{p}" for p in VALUES if rules[p] is rule and choice[p] != now[p]} for rule in OnResume}
        ends_before = now["epochs"] < 2 or (now["max_steps"] is not None and now["max_steps"] < 10)
        decision = decide(run(status, spec_of(choice)), spec_of(now))
        told = getattr(decision, "changes", ()) + getattr(decision, "warnings", ())
        named = {
            next(name for name in (f"train.{p}" for p in VALUES) if line.startswith((f"{name}:", f"{name}."))) for line in told
        }
        if changed[OnResume.FORBIDDEN] or ends_before:
            assert isinstance(decision, Refuse if status == "killed" else NewRun)
            assert status == "done" or changed[OnResume.FORBIDDEN] <= named <= changed[OnResume.FORBIDDEN] | LIMITS
            continue  # the next attempt is held against the same one
        if status == "done" and changed[OnResume.WARN]:
            assert isinstance(decision, NewRun)
            continue
        assert isinstance(decision, Continue) and named == changed[OnResume.WARN]
        choice = now
