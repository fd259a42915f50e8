"""Decide which run a command continues, and which changes it accepts. open_attempt.py acts on the decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import OnResume, resume_rules
from penstock.errors import ResumeError
from penstock.lease import refuse_if_held
from penstock.tasks.records.at_work import holders_of_runs
from penstock.tasks.records.keys import StageKey, changed_inputs
from penstock.tasks.records.ledger import Ledger, Run, lease_of
from penstock.tasks.stages import BEFORE_TRAINING
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.spec import TrainSpec
from penstock.training.state import TrainState

__all__ = [
    "Continue",
    "NewRun",
    "Past",
    "Refuse",
    "avoid_busy_run",
    "choose_run",
    "decide",
    "differences",
    "others_at_work",
    "past_of",
    "refusal",
    "refuse_same_training",
    "train_changes",
]

_MAY_LEAVE_ROWS = ("version.", "materialize.", "format", "key.")
"""Inputs that may change without changing the rows of training; preparing the rows shows it."""


@dataclass(frozen=True)
class Past:
    """The pipeline's current run, and its progress."""

    run: Run
    reached: TrainState | None = None
    """State of its newest committed checkpoint; None without one."""
    begun: bool = False
    """Training has begun in an attempt, so the tracked run may hold points."""


def past_of(ledger: Ledger, run: Run) -> Past:
    """Look up the progress of `run`.

    Raises:
        CheckpointError: a checkpoint is from a newer penstock.
    """
    committed = CheckpointStore(ledger.run_storage(run.run)).committed()
    if committed:
        return Past(run, committed[0].state, begun=True)
    return Past(run, begun=ledger.has_trained(run.run))


_LENGTHS = ("epochs", "num_epochs", "n_epochs", "max_epochs", "num_train_epochs", "steps", "num_steps", "max_steps")
"""Parameters of a loop that say how long it trains."""


@dataclass(frozen=True)
class NewRun:
    """Begin a new run."""

    reason: str


@dataclass(frozen=True)
class Continue:
    """Continue `run`; `warnings` list the changes that may cost bit-exactness.

    `open_attempt.reconfirm_run` decides again once the rows are prepared.
    """

    run: Run
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refuse:
    """Do not continue: the changes would break a promise."""

    run: Run
    changes: tuple[str, ...]


def refusal(decision: Refuse, command: str) -> ResumeError:
    """Return the error of a refused run; `command` begins a new run."""
    return ResumeError(
        f"run {decision.run.run} is not finished, and it cannot continue with these changes since its last attempt",
        problems=decision.changes,
        next_step=f"undo the change, or begin a new run: {command}",
    )


def decide(
    ledger: Ledger, current: Run | None, train: Mapping[str, Any], keys: Mapping[str, StageKey]
) -> NewRun | Continue | Refuse:
    """Decide what a `run` command does after `current`, the pipeline's current run, from the ledger.

    Raises:
        CheckpointError: a checkpoint is from a newer penstock.
    """
    if current is None:
        return choose_run(None, train, keys, fresh=False)
    key = keys["train"].key
    if key and "train" in current.keys and current.keys["train"].key == key:
        return Continue(current)  # whatever its progress: the other fields of train may change freely
    same = ledger.run_with_training(current.pipeline, key) if key else None
    return choose_run(past_of(ledger, current), train, keys, same=same, fresh=False)


def choose_run(
    past: Past | None, train: Mapping[str, Any], keys: Mapping[str, StageKey], *, fresh: bool, same: Run | None = None
) -> NewRun | Continue | Refuse:
    """Decide what a `run` command does.

    Args:
        past: the pipeline's current run, if any.
        train: the new spec's train section, as JSON.
        keys: the new stage keys.
        fresh: begin a new run.
        same: a run of the pipeline whose training has exactly the new key.
    """
    if fresh or past is None:
        return NewRun("asked for by --fresh" if fresh else "the first run of this pipeline")
    current, reached = past.run, past.reached
    if same is not None and same.run != current.run:
        return Continue(same)
    if reached is None:
        # No work is lost, but two trainings must not be tracked as one.
        changed = differences(current, keys) if past.begun else []
        return NewRun(f"the last run has no checkpoint, and since then {changed[0]}") if changed else Continue(current)
    changes = _field_changes(current.spec.get("train", {}), train)
    # Validation rows count where `best` is set: its change says more than theirs.
    best = [line for line in changes[OnResume.WARN] if line.startswith("train.checkpoint.best: ")]
    unfinished = current.done_key is None or current.keys["train"].key != current.done_key
    rows = _row_changes(current, keys, unfinished=unfinished)
    data = [each for line in rows for each in (best if best and line.startswith("rows.validation: ") else [line])]
    forbidden = [*data, *changes[OnResume.FORBIDDEN], *_start_changes(current, keys), *_already_beyond(train, reached)]
    warn = [*changes[OnResume.WARN], *_recipe_changes(current, keys)]
    if unfinished:
        return Refuse(current, tuple(forbidden)) if forbidden else Continue(current, tuple(warn))
    changed = [*forbidden, *warn]  # more epochs are in neither list
    if changed and not (len(changed) == 1 and _longer_loop(current.spec.get("train", {}), train)):
        return NewRun(f"the last run is done, and since then {changed[0]}")
    return Continue(current, tuple(warn))


def differences(run: Run, keys: Mapping[str, StageKey]) -> list[str]:
    """Describe how the training of `keys` differs from `run`'s, as far as the rows of both are known."""
    return [*_row_changes(run, keys), *train_changes(run, keys)]


def others_at_work(
    ledger: Ledger, pipeline: str, keys: Mapping[str, StageKey], held: Sequence[str] | None = None
) -> dict[str, list[str]]:
    """Return each run that a process works on, with its differences to the training of `keys`.

    Args:
        held: what `choosing_a_run` has yielded, in its block.
    """
    runs = map(ledger.load_run, holders_of_runs(ledger.storage, pipeline, held))  # None: a damaged record
    return {run.run: differences(run, keys) for run in runs if run is not None}


def refuse_same_training(ledger: Ledger, others: Mapping[str, Sequence[str]]) -> None:
    """Raise LeaseHeldError if one of `others_at_work` is the same training."""
    for name in (name for name, differs in others.items() if not differs):
        run = ledger.load_run(name)
        if run is not None:
            refuse_if_held(ledger.storage, lease_of(run))


def avoid_busy_run(decision: NewRun | Continue | Refuse, others: Mapping[str, Sequence[str]]) -> NewRun | Continue | Refuse:
    """If another process holds the run and the training differs, start a new run."""
    if isinstance(decision, NewRun) or not (differs := others.get(decision.run.run)):
        return decision
    return NewRun(f"another process works on run {decision.run.run}, where {differs[0]}")


def _row_changes(current: Run, keys: Mapping[str, StageKey], *, unfinished: bool = False) -> list[str]:
    """List the changes that made, or will make, the rows of training different.

    Files of which a rule holds rows out may have no row of training: of an `unfinished` run the prepared rows decide.
    """
    pairs = [(current.keys[stage].inputs, keys[stage].inputs) for stage in BEFORE_TRAINING if stage in current.keys]
    made_from = [change for old, new in pairs for change in changed_inputs(old, new)]
    before, now = current.keys.get("train"), keys["train"]
    if before is None or not before.key:
        return made_from
    if not now.key:
        return made_from if any(_changes_train_rows(old, new, unfinished) for old, new in pairs) else []
    rows = changed_inputs(*({n: v for n, v in key.inputs.items() if n.startswith("rows.")} for key in (before, now)))
    return made_from or rows if rows else []


def _changes_train_rows(old: Mapping[str, Any], new: Mapping[str, Any], unfinished: bool) -> bool:
    def decisive(inputs: Mapping[str, Any]) -> dict[str, Any]:
        by_rule = unfinished and any(name.startswith(("data.validation.", "data.test.")) for name in inputs)
        files = {name: file for name, file in inputs.get("files", {}).items() if name.startswith("train/") and not by_rule}
        return {name: value for name, value in inputs.items() if not name.startswith(_MAY_LEAVE_ROWS)} | {"files": files}

    return decisive(old) != decisive(new)


def _field_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[OnResume, list[str]]:
    found: dict[OnResume, list[str]] = {rule: [] for rule in OnResume}
    for path, rule in resume_rules(TrainSpec):
        if path != "recipe":
            found[rule] += _describe_change(f"train.{path}", _at(old, path), _at(new, path))
    return found


def _describe_change(name: str, before: Any, after: Any) -> list[str]:
    """Describe the differences between two values, entry by entry."""
    if before == after:
        return []
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = dict.fromkeys([*before, *after])
        return [line for each in names for line in _describe_change(f"{name}.{each}", before.get(each), after.get(each))]
    return [f"{name}: {before} -> {after}"]


def _already_beyond(train: Mapping[str, Any], reached: TrainState) -> list[str]:
    """List lengths that end before the newest checkpoint: the earlier weights may be deleted, and no schedule ended there."""
    if train.get("loop") is not None:
        return []  # the function has its own number of epochs
    epochs, max_steps = train.get("epochs"), train.get("max_steps")
    found: list[str] = []
    if epochs is not None and (reached.epoch, reached.position) > (epochs, 0):
        found.append(f"train.epochs: {epochs} ends before the newest checkpoint (epoch {reached.epoch}, step {reached.step})")
    if max_steps is not None and reached.step > max_steps:
        found.append(f"train.max_steps: {max_steps} ends before the newest checkpoint (step {reached.step})")
    return found


def _longer_loop(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a loop gets a greater number of epochs or steps than before, by the name of a parameter."""
    before, after = (section.get("params", {}) for section in (old, new))
    pairs = [(before.get(name), after.get(name)) for name in _LENGTHS if before.get(name) != after.get(name)]
    return new.get("loop") is not None and any(
        isinstance(less, int) and isinstance(more, int) and less < more for less, more in pairs
    )


def _recipe_changes(current: Run, keys: Mapping[str, StageKey]) -> list[str]:
    kinds = ("code.", "version.", "train.recipe")
    before, after = (
        {name: value for name, value in inputs.items() if name.startswith(kinds)}
        for inputs in (current.keys.get("train", keys["train"]).inputs, keys["train"].inputs)
    )
    return changed_inputs(before, after)


def train_changes(current: Run, keys: Mapping[str, StageKey]) -> list[str]:
    """List the inputs of training that differ, other than its rows."""
    before = current.keys.get("train", keys["train"])
    old, new = ({n: v for n, v in key.inputs.items() if not n.startswith("rows.")} for key in (before, keys["train"]))
    return changed_inputs(old, new)


def _start_changes(current: Run, keys: Mapping[str, StageKey]) -> list[str]:
    """Describe a change of the weights behind `train.start_from`: an alias moved, or a file was written again."""
    old, new = (key.inputs.get("start_from") for key in (current.keys.get("train", keys["train"]), keys["train"]))
    return [f"train.start_from names other weights: {str(old)[:8]} -> {str(new)[:8]}"] if old != new else []


def _at(section: Mapping[str, Any], path: str) -> Any:
    value: Any = section
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
