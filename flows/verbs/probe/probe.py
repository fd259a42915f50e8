"""What does `penstock probe` do? It prepares the rows, lets the workers read them, and prints where the time goes."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from penstock.flows.preflight.checks import Preflight, check_recipe
from penstock.flows.run.open_attempt import RayOnDemand
from penstock.flows.run.reporter import ConsoleReporter
from penstock.flows.servers.probes import ray_address
from penstock.flows.servers.services import prepare_environment
from penstock.flows.spec_file import LoadedSpec
from penstock.flows.verbs.probe.reading import OTHER, read_rank, summarize
from penstock.flows.verbs.run import raise_interrupted_on_stop
from penstock.machine.process import ProcessIdentity
from penstock.machine.stopping import StopRequest, stopping_on_signals
from penstock.tasks.all_stages import ALL_STAGES
from penstock.tasks.context import Reporter, RunContext
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Attempt, Ledger, utc_now
from penstock.tasks.spec import PipelineSpec
from penstock.tasks.stage import perform
from penstock.tasks.stages import BEFORE_TRAINING
from penstock.tasks.train import make_job
from penstock.training.on_ray.trainer import train
from penstock.training.tracking.tracker import Tracker

__all__ = ["ADVICE", "probe_pipeline"]

ADVICE = {
    "fetch": "shards come from the store: larger ones (materialize.shard_bytes), another order (shuffle), a nearer store; if "
    "more bytes are fetched than the split has, a larger cache (PENSTOCK_CACHE_BYTES, PENSTOCK_CACHE_DIR)",
    "read": "files or shards are opened and parsed: materialize.cache: memory, or more workers",
    "decode": "images are decoded while they are read; decode_image: {keep: pixels} with a cache decodes once",
    "transform": "the transforms run while training reads: materialize.cache: disk runs them once",
    "gather": "rows are copied into batches, from the disk where memory does not hold them: shuffle.mode: windowed",
    "augment": "the recipe's augment: give it fewer operations, or move what is not random to a transform",
    "copy": "batches go to the GPU: smaller dtypes (bytes instead of floats) go faster",
    "tasks": "the tasks that prepare rows are slower than the workers that read them: more CPUs or nodes for them, cheaper "
    "transforms, or materialize.cache: disk, which prepares rows once",
    OTHER: "row numbers are found and batches cut, at the same cost for each batch: a larger train.batch_rows",
}
"""Place -> the work that takes the time there, and the keys that change it."""


def probe_pipeline(loaded: LoadedSpec, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure how the pipeline is read; returns the JSON object of `penstock probe --json`.

    Rows that are not prepared yet are prepared, and are there for the next run. No run begins.

    Args:
        report: takes lines for a person.

    Raises:
        PenstockError: the pipeline cannot be read as it is configured.
    """
    began_s = time.monotonic()
    prepare_environment()
    preflight = Preflight(loaded)
    _ = preflight.storage, preflight.resources
    check_recipe(preflight.project)
    if ray_address() is None:
        _ = preflight.machine
    reporter, stopping = ConsoleReporter(), StopRequest()
    with contextlib.ExitStack() as stack:
        stack.enter_context(raise_interrupted_on_stop(stopping))
        stack.enter_context(stopping_on_signals(stopping))
        need_ray = RayOnDemand(loaded, reporter, stopping, stack)
        ctx = _context(loaded, reporter, stopping, need_ray)
        for stage in ALL_STAGES:
            if stage.name in BEFORE_TRAINING:
                stopping.check()
                perform(stage, ctx)
        reading = _read(ctx)
    prepare_s = sum(outcome.seconds for outcome in ctx.outcomes.values())
    result = {"status": "done", "prepare_s": prepare_s, **reading, "advice": ADVICE[reading["place"]]}
    result |= {"seconds": time.monotonic() - began_s}
    for line in _lines(result, loaded.spec):
        report(line)
    return result


class _NullTracker:
    """Ignores whatever a tracker is called for."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_arguments, **_options: None


def _context(loaded: LoadedSpec, reporter: Reporter, stopping: StopRequest, need_ray: RayOnDemand) -> RunContext:
    """Return the context that stages work with, of a run that is not recorded."""
    ledger, project = Ledger(loaded.project.storage), loaded.project
    return RunContext(
        project=project,
        keys=stage_keys(project, ledger.stage_output),
        ledger=ledger,
        run=ledger.new_run(loaded.spec.name, loaded.spec.model_dump(mode="json", by_alias=True)),
        attempt=Attempt(number=1, process=ProcessIdentity.current(), started=utc_now()),
        tracker=cast(Tracker, _NullTracker()),
        reporter=reporter,
        state_dir=loaded.state_dir,
        need_ray=need_ray,
        stopping=stopping,
    )


def _read(ctx: RunContext) -> dict[str, Any]:
    own_cluster = ctx.need_ray()
    split_bytes = ctx.manifest.table.size_bytes.get("train", 0)
    own = f"probes/{uuid.uuid4().hex[:12]}"  # the workers check that they see the storage
    job = replace(make_job(ctx), run_storage=ctx.storage.child(own))
    ctx.stopping.graceful = True
    try:
        outcome = train(job, stop=ctx.stopping.stop, listener=lambda _events: None, own_cluster=own_cluster, work=read_rank)
        ctx.stopping.check()
        return summarize(outcome.returned or (), split_bytes)
    finally:
        ctx.stopping.graceful = False
        ctx.storage.delete(own)


def _lines(result: dict[str, Any], spec: PipelineSpec) -> list[str]:
    time_goes = ", ".join(f"{name} {share:.0%}" for name, share in result["time"].items() if share >= 0.005)
    p50_ms, p95_ms, longest_ms = (result[name] * 1e3 for name in ("p50_s", "p95_s", "longest_s"))
    by_node = ", ".join(f"{node} {size / 1e6:,.1f} MB" for node, size in result["fetched_by_node"].items())
    fetched = [f"  fetched      {by_node}, of {result['split_bytes'] / 1e6:,.1f} MB"] if result["fetched_bytes"] else []
    return [
        f"cache {spec.materialize.cache}, shuffle {spec.shuffle.mode}, {spec.train.workers} workers, "
        f"{result['epochs']:.2f} epochs read",
        f"  first batch  {result['first_batch_s']:.3f} s",
        f"  then waits   P50 {p50_ms:.2f} ms, P95 {p95_ms:.2f} ms, longest {longest_ms:.1f} ms",
        f"  rate         {result['rows_per_s']:,.0f} rows/s, {result['worker_mib_per_s']:,.1f} MiB/s each worker",
        f"  time goes    {time_goes}",
        *fetched,
        f"  {result['place']}: {result['advice']}",
    ]
