"""The flow of predictions: the model and the files are found, and what is not scored yet is scored.

`predict` is what Prefect runs, ad hoc or from a deployment.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import State, flow
from prefect.states import Cancelled, Completed

from penstock.errors import DataError, Interrupted, PenstockError, PreflightError
from penstock.flows.predict.request import PredictRequest
from penstock.flows.preflight.nodes import refuse_unfit_nodes
from penstock.flows.run.flow_runs import name_at_begin, name_flow_run, remember_end
from penstock.flows.run.reporter import ConsoleReporter
from penstock.flows.servers.probes import storage_failure
from penstock.flows.servers.services import ray_cluster
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import format_of
from penstock.ingest.prepare import ANYWHERE
from penstock.ingest.ray_tasks import ray_map
from penstock.lease import hold_lease
from penstock.machine.prints import passing_prints
from penstock.machine.stopping import StopRequest, stop_behind, stopping_on_signals
from penstock.messages import counted, shorten
from penstock.progress import silent
from penstock.redact import hiding_secrets, redact_text
from penstock.storage import Storage
from penstock.tasks.context import Reporter, StageOutcome
from penstock.training.predict.asked import ask, check_input, list_input, state_of
from penstock.training.predict.output import OWN, Output, PredictedUnit
from penstock.training.predict.score import Plan, Scored, plan, score
from penstock.training.predict.unit import Scorer, ScoringJob, packed_model
from penstock.training.registry.load import FetchedModel, fetched_model
from penstock.training.registry.loaded_model import LoadedModel
from penstock.training.tracking.mlflow_store import mlflow_uri

if TYPE_CHECKING:
    from penstock.flows.servers.ray_local import RayCluster

__all__ = ["predict"]

LEASE = f"{OWN}/lease"


@flow(name="penstock-predict", flow_run_name=name_at_begin, persist_result=False)
def predict(request: PredictRequest) -> State[Any]:
    """Score what is not scored yet. The result is the data of the state, completed or cancelled."""
    reporter, stopping, scored = ConsoleReporter(), StopRequest(), Scored()
    begun = time.time()
    with contextlib.ExitStack() as stack:
        stack.enter_context(hiding_secrets())
        stack.enter_context(stopping_on_signals(stopping))
        storage = Storage(request.output)
        model = stack.enter_context(fetched_model(request.model, mlflow_uri(Path(request.state_dir))))
        asked = ask(model, request.input, request.format, request.columns, request.options)
        if not asked.is_kept or os.path.exists(asked.data.train):
            check_input(asked.data.train, storage)
        # Rows that are in no files become some in the output, which no other command may write to.
        listing = None if asked.is_kept else list_input(asked.data)
        if listing is not None and (left_out := listing.describe_left_out()):
            reporter.warn(left_out.replace("data.format", "--format"))
        output = Output(storage)
        _check_output(output)
        stack.enter_context(hold_lease(storage, LEASE, on_lost=stopping.give_up))
        result: dict[str, Any] = {
            "model_uri": model.uri,
            "model_digest": asked.model_digest,
            "input": redact_text(asked.data.train)[:500],
            "output": redact_text(storage.root),
        }
        try:
            output.claim(asked.input_digest, result["input"])
            if listing is None:
                reporter.report(f"{model.uri}: reading {shorten(asked.data.train)}")
                listing = format_of(asked.data).listing(asked.data, Path.cwd(), storage.child(OWN))
                stopping.check()
            result |= {"files": len(listing.files), "state": state_of(listing.files)}
            work = plan(output, asked, listing.files)
            of_state = f"{result['state'].replace('-', ' ', 1)}: " if result["state"] else ""
            reporter.report(f"{model.uri}: {of_state}{_work_text(work, len(listing.files))}")
            name_flow_run(f"{model.uri} on {Path(request.input).name[:60]}", [model.name or "model"])
            connect = partial(_connected, request, reporter, stopping, stack)
            run = partial(_on_ray, connect, request, model, listing.files, storage)
            progress = reporter.progress("predict") if work.todo else silent
            with passing_prints(lambda line: reporter.report(f"predict: {line}")):
                score(output, asked, listing.files, work, run, progress, scored)
            format_of(asked.data).forget_others(listing.files, storage.child(OWN))
            stopping.check()
        except BaseException as error:
            stopped = stop_behind(error)
            if stopping.lost is not None:
                raise stopping.lost from error
            result |= {**_counts(scored, begun), "status": "failed"}
            if isinstance(stopped, Interrupted):
                message = f"{stopped.message}: {counted(scored.units, 'unit is', 'units are')} committed"
                return Cancelled(message=message, data={**result, "status": "interrupted", "signum": stopped.signum})
            if isinstance(error, PenstockError):
                error.result = result
            raise
        for warning in scored.warnings:
            reporter.warn(warning)
        manifest = scored.manifest
        assert manifest is not None
        result |= {"status": "done", **_counts(scored, begun), "warnings": scored.warnings}
        result |= {"total_rows": manifest.rows, "total_unscored": manifest.unscored}
        result |= manifest.model_dump(include={"data_digest", "code_digest"})
        counts = {"rows": scored.rows, "not scored": scored.unscored, "in the output": manifest.rows}
        facts = tuple((name, f"{count:,}") for name, count in counts.items())
        reporter.finished(StageOutcome("predict", "", "ran" if work.todo else "reused", result["seconds"], result, facts))
        message = ", ".join(f"{name}: {count}" for name, count in facts)
        return remember_end(Completed(message=message, data=result))


def _work_text(work: Plan, num_files: int) -> str:
    left = len({file.name for job in work.todo for file in job.files})
    if not left:
        return f"all {counted(num_files, 'file')} scored already"
    return f"{counted(left, 'file')} to score" + (f", {num_files - left:,} scored already" if left < num_files else "")


def _check_output(output: Output) -> None:
    failure = storage_failure(output.storage)
    if failure is not None:
        error = failure.error
        reason = error.message if isinstance(error, PenstockError) else getattr(error, "strerror", None) or error
        raise PreflightError(
            f"--output {output.storage.root} cannot be {failure.verb}: {reason}",
            next_step="correct --output, or the credentials and AWS_ENDPOINT_URL, and run the same command",
        ) from error
    output.refuse_others()


def _connected(request: PredictRequest, reporter: Reporter, stopping: StopRequest, stack: contextlib.ExitStack) -> RayCluster:
    """Start Ray or join its cluster; `stack` ends what is started."""
    reporter.report("  connecting to Ray")
    cluster = stack.enter_context(ray_cluster(Path(request.state_dir)))
    stopping.check()
    return cluster


def _on_ray(
    connect: Callable[[], RayCluster],
    request: PredictRequest,
    model: FetchedModel,
    files: Sequence[SourceFile],
    storage: Storage,
    jobs: Sequence[ScoringJob],
) -> Iterator[PredictedUnit | DataError]:
    """Score units on the cluster, as many at once as it has CPUs for, or GPUs if they are asked for."""
    requires = LoadedModel(model.folder).form.requires  # loaded here, where an error is one and not one for each worker
    cluster = connect()
    if request.gpus and not cluster.num_gpus:
        raise PreflightError(
            f"--gpus: the Ray cluster {cluster.address} has no GPU", next_step="leave --gpus out, or join a cluster that has"
        )
    import ray

    if not cluster.embedded:
        refuse_unfit_nodes(cluster, storage, requires, [files[0], *files[1:][-1:]])
    where = ANYWHERE.with_gpus(float(request.gpus))
    return ray_map(partial(_score_there, ray.put(packed_model(model.folder))), jobs, where=where, keeps_gpus=True)


def _score_there(packed: Any, job: ScoringJob) -> PredictedUnit | DataError:
    return _scorer(packed)(job)


@lru_cache(maxsize=1)
def _scorer(packed: Any) -> Scorer:
    """Load the model in a process of the cluster, once."""
    import ray

    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray would show it all GPUs of its node
    return Scorer(ray.get(packed))


def _counts(scored: Scored, begun: float) -> dict[str, Any]:
    seconds = time.time() - begun
    return {
        "units": scored.units,
        "rows": scored.rows,
        "unscored": scored.unscored,
        "unseen_categories": dict(sorted(scored.unseen.items())),
        "seconds": round(seconds, 3),
        "rows_per_s": round(scored.rows / seconds, 1),
    }
