"""Plan what `penstock run` would do, stage by stage, and why. Reads the ledger; runs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from penstock.errors import DataError, PenstockError, SpecError
from penstock.flows.preflight.checks import Preflight, check_named, check_storage
from penstock.flows.preflight.cpus import tasks_refused
from penstock.flows.run.decisions import (
    Continue,
    NewRun,
    Refuse,
    avoid_busy_run,
    decide,
    others_at_work,
    past_of,
    refusal,
    refuse_same_training,
    train_changes,
)
from penstock.flows.servers.probes import ray_address
from penstock.flows.servers.services import ray_cluster
from penstock.flows.spec_file import LoadedSpec
from penstock.ingest.feed.batch import FeedShare
from penstock.ingest.feed.mapped_shards import most_of_a_rank
from penstock.ingest.manifest import STREAMS, DatasetManifest
from penstock.ingest.prepare import ANYWHERE
from penstock.ingest.shuffle.mixing_quality import chi2_by_freedom
from penstock.messages import counted, run_command
from penstock.tasks.all_stages import ALL_STAGES
from penstock.tasks.prepare import MATERIALIZE
from penstock.tasks.project import Project
from penstock.tasks.records.keys import StageKey, changed_inputs, stage_keys
from penstock.tasks.records.ledger import Ledger, Run
from penstock.tasks.shuffle import train_order
from penstock.tasks.spec import PipelineSpec
from penstock.tasks.stage import Stage, VerifyContext
from penstock.tasks.stages import BEFORE_TRAINING, STAGES
from penstock.training.state import TrainState

if TYPE_CHECKING:
    from penstock.flows.servers.ray_local import RayCluster

__all__ = [
    "OVERLAPS",
    "describe_preparing",
    "describe_workers",
    "format_preparing",
    "format_workers",
    "plan_pipeline",
    "show_plan",
]

OVERLAPS = "training begins with the first units, while the others are prepared (materialize.overlap)"


def plan_pipeline(loaded: LoadedSpec) -> dict[str, Any]:
    """Plan a run: `decision`, `run`, and for each stage its `action`, `key` and `because`.

    The actions: reuse, resume, run, and `depends` if no step is trained again as long as the rows stay the same.

    Raises:
        SpecError, DataError, ServiceError: the plan cannot be made.
    """
    project = loaded.project
    ledger = Ledger(project.storage)
    try:
        keys = stage_keys(project, ledger.stage_output)
    except (SpecError, DataError):
        check_named(project)  # reports everything that is missing
        raise
    current = ledger.current_run(loaded.spec.name)
    others = others_at_work(ledger, loaded.spec.name, keys)
    decision = avoid_busy_run(
        decide(ledger, current, loaded.spec.model_dump(mode="json", by_alias=True)["train"], keys), others
    )
    continued = decision.run if isinstance(decision, Continue) else None
    last = current if isinstance(decision, NewRun) else continued
    reached = past_of(ledger, last).reached if last is not None else None
    stages: list[dict[str, Any]] = []
    will_run: set[str] = set()
    upstream: dict[str, dict[str, Any]] = {}
    run_id = continued.run if continued else ""
    context = VerifyContext(project, run_id, deep=False, state_dir=loaded.state_dir, upstream=upstream)
    for stage in ALL_STAGES:
        entry, output = _plan_stage(stage, context, ledger, keys, continued or current, reached, will_run)
        stages.append(entry)
        upstream[stage.name] = output
        if entry["action"] != "reuse":
            will_run.add(stage.name)
    stages[STAGES.index("shuffle")]["workers"] = describe_workers(project, upstream["materialize"])
    if "train" in will_run:
        _plan_rows(stages[STAGES.index("materialize")], project, ledger)
    plan = {
        "status": "done",
        "decision": {NewRun: "new run", Continue: "continue", Refuse: "refuse"}[type(decision)],
        "reason": decision.reason if isinstance(decision, NewRun) else "",
        "warnings": list(decision.warnings) if isinstance(decision, Continue) else [],
        "refused_because": list(decision.changes) if isinstance(decision, Refuse) else [],
        "run": decision.run.run if isinstance(decision, Continue | Refuse) else None,
        "stages": stages,
        "prepare": describe_preparing(loaded.spec),
        "overlap": loaded.spec.overlaps and {"materialize", "train"} <= will_run,
    }
    try:
        refuse_same_training(ledger, others)
        if isinstance(decision, Refuse):
            raise refusal(decision, run_command(loaded.file, loaded.overrides, "--fresh"))
        if will_run:
            preflight = Preflight(loaded)
            preflight.ahead(writes=False)
            finished = continued is not None and continued.done_key and continued.done_key == continued.keys["train"].key
            depends = stages[STAGES.index("train")]["action"] == "depends"
            if "train" in will_run and ray_address() is None and not (finished and depends):
                _ = preflight.machine
            if plan["prepare"] and ray_address() is not None and will_run & set(BEFORE_TRAINING):
                with ray_cluster(loaded.state_dir) as cluster:
                    if (refusal_of_nodes := tasks_refused(loaded.spec, cluster.labelled, cluster.most)) is not None:
                        raise refusal_of_nodes
                    plan["prepare"] = describe_preparing(loaded.spec, cluster)
        else:
            check_storage(project.storage, writes=False)
    except PenstockError as error:
        error.result = plan
        raise
    return plan


def show_plan(plan: dict[str, Any], console: Console) -> None:
    """Print a plan on the terminal."""
    about = plan["run"] or plan["reason"]
    console.print(plan["decision"] + (f": {about}" if about else ""))
    for line in plan["warnings"]:
        console.print(f"  warning: {line}", style="yellow")
    table = Table("stage", "action", "key", "because", box=None)
    for entry in plan["stages"]:
        table.add_row(entry["name"], entry["action"], entry["key"][:12], "\n".join(entry["because"]))
    console.print(table, soft_wrap=False)
    if plan["prepare"]:
        console.print(f"prepare: {format_preparing(plan['prepare'])}")
    if plan["overlap"]:
        console.print(f"materialize: {OVERLAPS}")
    workers = next((entry["workers"] for entry in plan["stages"] if entry.get("workers")), None)
    if workers is not None:
        console.print(f"shuffle: {format_workers(workers)}")


def describe_workers(project: Project, rows: dict[str, Any]) -> dict[str, Any] | None:
    """Describe what a worker reads of the train split; None if its shards are not known, or one worker reads all in one lane.

    Args:
        rows: the output of `materialize`, or empty.
    """
    if not rows:
        return None
    manifest = DatasetManifest.model_validate(rows).opened(project.storage)
    if not len(sizes := manifest.parts_of("train")[1]):
        return None
    train, streamed = project.spec.train, STREAMS in manifest.extra
    order = train_order(project.spec.shuffle, manifest, train.lane_batch_rows)
    # An order of one lane does not know the windows of a stream.
    if order.lanes == 1 and (streamed or (train.workers == 1 and project.spec.shuffle.mode != "windowed")):
        return None
    part = FeedShare(train.batch_rows, world_size=train.workers, last=train.last_batch)
    most = most_of_a_rank(order, sizes, part)
    chi2 = chi2_by_freedom(order, train.batch_rows)
    mixing = {"chi2_by_freedom": None if chi2 is None else round(chi2, 2)}
    return {"lanes": order.lanes, "units" if streamed else "shards": len(sizes), "workers": train.workers, **most, **mixing}


def format_workers(workers: dict[str, Any]) -> str:
    """Format the result of `describe_workers` as one line."""
    part, reads = ("unit", "prepares") if "units" in workers else ("shard", "reads")
    several = workers.get("shards", workers["lanes"]) < workers["lanes"] and workers["workers"] > 1
    fetched, at_once, chi2 = workers["fetch_bytes"] / 1e6, workers["disk_bytes"] / 1e6, workers["chi2_by_freedom"]
    return (
        f"{counted(workers['lanes'], 'lane')} of {counted(workers[f'{part}s'], part)}; each of "
        f"{counted(workers['workers'], 'worker')} {reads} at most {workers['rows']:,} rows an epoch from {fetched:,.1f} MB, "
        f"{at_once:,.1f} MB of them at once"
        + ("; lanes share shards, so several workers fetch one" if several else "")
        + (f"; sorted rows mix with chi2/df {chi2:g} (a full shuffle: 1)" if chi2 is not None else "")
    )


def describe_preparing(spec: PipelineSpec, cluster: RayCluster | None = None) -> dict[str, Any] | None:
    """Describe where the tasks run that read and prepare rows, and on how many nodes of a cluster; None if anywhere."""
    where = spec.preparing
    if where == ANYWHERE:
        return None
    there = {} if cluster is None else {"nodes": len(where.fitting(cluster.labelled)), "tasks": where.at_once(cluster.labelled)}
    return {**where.model_dump(mode="json", exclude_defaults=True), **there, "text": str(where)}


def format_preparing(preparing: dict[str, Any]) -> str:
    """Format the result of `describe_preparing` as one line."""
    if "nodes" not in preparing:
        return str(preparing["text"])
    held = f"{counted(preparing['nodes'], 'node')}, {counted(preparing['tasks'], 'task')} at once"
    return f"{preparing['text']}; {held}"


def _plan_rows(entry: dict[str, Any], project: Project, ledger: Ledger) -> None:
    """Correct the plan of materialize: its record may hold while the shards that training reads are gone."""
    record = ledger.stage_record(MATERIALIZE.record_path("", entry["key"]), entry["key"])
    in_store = project.spec.materialize.cache == "disk" and not project.storage.is_local  # whose shards are read by no check
    if entry["action"] == "reuse" and record is not None and not in_store:
        problem = MATERIALIZE.verify(VerifyContext(project, "", deep=True, will_train=True), record.output)
        if problem is not None:
            entry.update(action="run", because=[problem])


def _plan_stage(
    stage: Stage,
    context: VerifyContext,
    ledger: Ledger,
    keys: dict[str, StageKey],
    current: Run | None,
    reached: TrainState | None,
    will_run: set[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plan of one stage, and the output it would reuse."""
    key = keys[stage.name]
    entry: dict[str, Any] = {"name": stage.name, "key": key.key, "action": "run", "because": []}
    record = None
    if not (stage.of_run and (not context.run_id or will_run & {"train"})):
        record = ledger.stage_record(stage.record_path(context.run_id, key.key), key.key)
    if record is not None:
        problem = stage.verify(context, record.output)
        if problem is None:
            return {**entry, "action": "reuse", "because": [f"made {record.made}"]}, record.output
        return {**entry, "because": [problem]}, {}
    old = current.keys.get(stage.name) if current else None
    inputs = {name: value for name, value in (old.inputs if old else {}).items() if key.key or not name.startswith("rows.")}
    because = changed_inputs(inputs, key.inputs) if old else ["never run"]
    above = BEFORE_TRAINING if stage.name == "train" else [n.removeprefix("key.") for n in key.inputs if n.startswith("key.")]
    because += [f"{name} runs" for name in above if name in will_run]
    if not key.key and reached is not None and current is not None and old and old.key and not train_changes(current, keys):
        return {**entry, "action": "depends", "because": ["on the rows: no step is trained again if they stay the same"]}, {}
    if stage.name == "train" and context.run_id and reached is not None:
        return {**entry, "action": "resume", "because": [f"checkpoint at step {reached.step}", *because]}, {}
    return {**entry, "because": because or ["not finished yet"]}, {}
