"""Put a pipeline on a schedule, as a Prefect deployment of our flow for a process work pool.

A deployment holds a name, a schedule and the path of the pipeline file; a worker imports the installed penstock and reads the
file when a run begins. Nothing secret is stored in Prefect: credentials belong in the environment of the worker.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import httpx
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.server.schemas.schedules import CronSchedule as PlannedCron
from prefect.utilities.callables import parameter_schema
from prefect.utilities.urls import url_for
from prefect.workers.process import ProcessWorker
from pydantic import ValidationError

from penstock import __version__
from penstock.errors import ServiceError, SpecError
from penstock.flows.deploy.notify import NOBODY, Notify, forget_messages, put_messages
from penstock.flows.servers.services import prefect_api
from penstock.flows.spec_file import LoadedSpec, load_spec

__all__ = ["ENTRYPOINT", "Plan", "deploy_pipeline"]

ENTRYPOINT = "penstock.flows.pipeline.pipeline"
"""A module path: workers have penstock installed, so no code is fetched."""

_OF_WORKER = ("RAY_ADDRESS", "MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "PENSTOCK_CACHE_DIR")
"""Settings that decide where a run happens. They and all secrets belong in the worker's environment."""


class Plan(NamedTuple):
    """Schedule, work pool and messages."""

    cron: str
    """Five fields."""
    timezone: str = "UTC"
    """Time zone of the fields, as Europe/Berlin."""
    pool: str = "penstock"
    """Work pool of type process; it is created if absent."""
    notify: str | None = None
    """Address of messages; `none` removes it, None leaves it unchanged."""


def deploy_pipeline(file: Path, plan: Plan, overrides: list[str], report: Callable[[str], None]) -> dict[str, Any]:
    """Create the deployment `penstock/<pipeline name>`, or update it if it exists.

    Args:
        file: the pipeline file; workers must find it under the same absolute path.
        plan: schedule, work pool and messages.
        overrides: `a.b=value` texts that every run of the deployment applies.
        report: prints a line.

    Returns:
        The JSON object of `penstock deploy --json`.

    Raises:
        SpecError: the pipeline file, an override or the schedule is wrong; nothing was deployed.
        ServiceError: there is no Prefect server, it does not answer, or the pool is of another type.
    """
    loaded = load_spec(file, overrides)
    _check_schedule(plan)
    notify = None if plan.notify in (None, NOBODY) else Notify.parse(str(plan.notify))
    _require_server(loaded)
    with prefect_api(loaded.state_dir):
        # Imported here: it loads Ray and torch, seconds that a refusal does not need.
        from penstock.flows.pipeline import pipeline
        from penstock.flows.run.request import RunRequest

        request = RunRequest(file=str(loaded.file), overrides=list(loaded.overrides)).model_dump(mode="json")
        full_name = f"{pipeline.name}/{loaded.spec.name}"
        messages = None
        try:
            with get_client(sync_client=True) as client:
                deployment_id = _put(client, pipeline, full_name, request, plan, report)
                if notify is not None:
                    messages = put_messages(client, full_name, deployment_id, str(loaded.file), notify)
                    report(f"a run that fails sends a message to {notify.shown}")
                elif plan.notify == NOBODY and forget_messages(client, full_name, deployment_id):
                    report("its messages are deleted")
        except (PrefectException, httpx.HTTPError, ValidationError) as error:
            raise ServiceError(
                f"Prefect at {os.environ['PREFECT_API_URL']} did not take the deployment: {error}",
                next_step="read the log of that server, and run the same command",
            ) from error
        url = url_for("deployment", deployment_id)
    here = [name for name in _OF_WORKER if os.environ.get(name)]
    if here:
        report(f"its runs have the worker's environment: set {', '.join(here)} there, too")
    report(f"{full_name} runs at {plan.cron!r} {plan.timezone}: {url}")
    report(f"a worker performs it: prefect worker start --pool {plan.pool} --type process")
    return {
        "status": "done",
        "deployment": full_name,
        "id": str(deployment_id),
        "work_pool": plan.pool,
        "cron": plan.cron,
        "timezone": plan.timezone,
        "url": url,
        "environment": here,
        "notify": messages,
    }


def _require_server(loaded: LoadedSpec) -> None:
    if not os.environ.get("PREFECT_API_URL"):
        raise ServiceError(
            f"cannot deploy {loaded.spec.name!r}: a schedule needs a permanent Prefect server, and PREFECT_API_URL is not set "
            "(the embedded server ends with its command)",
            next_step="prefect server start; in another shell: "
            "export PREFECT_API_URL=http://127.0.0.1:4200/api, and the same command again",
        )


def _check_schedule(plan: Plan) -> None:
    cron, timezone = plan.cron, plan.timezone
    rule = 'five fields "minute hour day month weekday", such as "0 3 * * *" for every day at 03:00'
    # Prefect takes a sixth field, for seconds: one field too many would mean sixty times as many runs.
    if len(cron.split()) != 5:
        raise SpecError(f"--cron {cron!r} has {len(cron.split())} fields; a schedule is {rule}")
    try:
        PlannedCron(cron="0 3 * * *", timezone=timezone)
    except ValidationError as error:
        raise SpecError(f"--timezone {timezone!r} is not a time zone, such as Europe/Berlin or UTC") from error
    try:
        asyncio.run(PlannedCron(cron=cron, timezone=timezone).get_dates(n=1))
    except ValueError as error:  # of pydantic, or a day that no named month has: it would never come
        raise SpecError(f"--cron {cron!r} is not a schedule, or never comes; a schedule is {rule}") from error


def _put(
    client: SyncPrefectClient,
    flow: Flow[Any, Any],
    full_name: str,
    request: dict[str, Any],
    plan: Plan,
    report: Callable[[str], None],
) -> UUID:
    name = full_name.partition("/")[2]
    _require_process_pool(client, plan.pool, report)
    _warn_of_changes(client, full_name, request["file"], report)
    return client.create_deployment(
        flow_id=client.create_flow(flow),
        name=name,
        version=__version__,
        description=f"The pipeline `{name}` of `{request['file']}`, made by `penstock deploy`.",
        entrypoint=ENTRYPOINT,
        parameters={"request": request},
        parameter_openapi_schema=parameter_schema(flow).model_dump_for_openapi(),
        enforce_parameter_schema=True,
        # A second run of the same training waits, instead of being refused by the lease.
        concurrency_limit=1,
        concurrency_options=ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        schedules=[
            DeploymentScheduleCreate(schedule=CronSchedule(cron=plan.cron, timezone=plan.timezone), active=True, slug="cron")
        ],
        paused=False,
        work_pool_name=plan.pool,
        # With streamed output, the death of a worker would end its runs at their next line of log.
        job_variables={"stream_output": False},
        tags=["penstock", name],
    )


def _require_process_pool(client: SyncPrefectClient, pool: str, report: Callable[[str], None]) -> None:
    try:
        there = client.read_work_pool(pool)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=pool, type=ProcessWorker.type, base_job_template=template))
        report(f"made the work pool {pool!r}")
        return
    if there.type != ProcessWorker.type:
        raise ServiceError(
            f"the work pool {pool!r} is of type {there.type!r}; penstock deploys to type process, whose workers see the files",
            next_step="name another pool with --pool; it is made if absent",
        )
    if there.is_paused:
        report(f"warning: the work pool is paused, so nothing runs until: prefect work-pool resume {shlex.quote(pool)}")


def _warn_of_changes(client: SyncPrefectClient, full_name: str, file: str, report: Callable[[str], None]) -> None:
    """Warn if the name belonged to another file, and if a pause ends."""
    try:
        before = client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return
    worked_on = before.parameters.get("request", {}).get("file")
    if worked_on != file:
        report(f"warning: the file of {full_name} was {worked_on} until now; a deployment is named after the pipeline's `name`")
    if before.paused or not any(schedule.active for schedule in before.schedules):
        report(f"warning: {full_name} was paused until now; it runs again, on this schedule")
