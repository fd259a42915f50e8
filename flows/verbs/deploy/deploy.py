"""How does a pipeline get onto a schedule? As a Prefect deployment of our flow for a process work pool.

A deployment holds a name, a schedule and the path of the pipeline file; a worker imports the installed penstock and reads the
file when a run begins. Nothing secret is stored in Prefect: credentials belong in the environment of the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
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
from prefect.types.names import BANNED_CHARACTERS
from prefect.utilities.callables import parameter_schema
from prefect.utilities.urls import url_for
from prefect.workers.process import ProcessWorker
from pydantic import BaseModel, ValidationError

from penstock import __version__
from penstock.errors import ServiceError, SpecError
from penstock.flows.predict.request import PredictRequest
from penstock.flows.servers.services import prefect_api
from penstock.flows.spec_file import LoadedSpec, load_spec
from penstock.flows.verbs.deploy.notify import NOBODY, forget_messages, notify_of, put_messages, sends_messages

__all__ = ["ENTRYPOINT", "PREDICT_ENTRYPOINT", "Plan", "deploy_pipeline", "deploy_predictions"]


ENTRYPOINT = "penstock.flows.pipeline.pipeline"
"""A module path: penstock is installed where workers run, so no code is fetched and a project's folders stay out of the way."""

PREDICT_ENTRYPOINT = "penstock.flows.predict.flow.predict"

_PASSED_ON = (
    "RAY_ADDRESS",
    "MLFLOW_TRACKING_URI",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "PENSTOCK_CACHE_BYTES",
    "PENSTOCK_CACHE_DIR",
)
"""Addresses that say where a run works. They are stored with the deployment, in plain text, if they are set here."""


class Plan(NamedTuple):
    """When and where a deployment runs, and who gets messages: the options that both kinds of deployment take."""

    cron: str
    """Five fields."""
    timezone: str = "UTC"
    """Of the fields, as Europe/Berlin."""
    pool: str = "penstock"
    """Work pool of type process; it is created if absent."""
    notify: str | None = None
    """Address of messages, or `none` to remove what was there; None leaves all as it is."""
    silence_h: float | None = None
    """Hours without a run after which a message comes, instead of a day."""


class _Work(NamedTuple):
    """What a deployment performs."""

    flow: Flow[Any, Any]
    entrypoint: str
    request: BaseModel
    about: str
    named_by: str
    """The field of the request whose change means other work under the same name."""


def deploy_pipeline(file: Path, plan: Plan, overrides: list[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Create the deployment `penstock/<pipeline name>`, or update it if it exists.

    Args:
        file: the pipeline file; workers must find it under the same absolute path.
        plan: schedule, work pool and messages.
        overrides: `a.b=value` texts that every run of the deployment applies.
        say: takes lines for a person.

    Returns:
        The JSON object of `penstock deploy --json`.

    Raises:
        SpecError: the pipeline file, an override or the schedule is wrong; nothing was deployed.
        ServiceError: there is no Prefect server to keep a schedule, it does not answer, or the pool is of another type.
    """
    loaded = load_spec(file, overrides)

    def work() -> _Work:
        # It brings Ray and torch along: seconds that a refusal does not need.
        from penstock.flows.pipeline import pipeline
        from penstock.flows.run.request import RunRequest

        request = RunRequest(file=str(loaded.file), overrides=list(loaded.overrides))
        return _Work(pipeline, ENTRYPOINT, request, f"The pipeline `{loaded.spec.name}` of `{loaded.file}`", "file")

    return _deploy(loaded, work, plan, say)


def deploy_predictions(
    file: Path, plan: Plan, model: str | None, make: Callable[[str], PredictRequest], say: Callable[[str], None]
) -> dict[str, Any]:
    """Create the deployment `penstock-predict/<pipeline name>`, or update it. Result as that of `deploy_pipeline`.

    Args:
        file: the pipeline file whose model scores; its project holds the MLflow store if no server is named.
        plan: as in `deploy_pipeline`.
        model: another address than that of the pipeline's registered model at its alias.
        make: the request for a model's address.

    Raises:
        SpecError, ServiceError: as `deploy_pipeline`; SpecError, too, if `model` is None and the pipeline's has no alias,
            and for a format or an option of it that is wrong.
    """
    loaded = load_spec(file, [])
    is_own = model is None
    if model is None:
        register = loaded.spec.register_
        if register.alias is None:
            raise SpecError(
                f"{loaded.file}: its section register names no alias, so the version that scores is not known",
                next_step=f"set register.alias, or name the model: --model models:/{register.name or loaded.spec.name}@ALIAS",
            )
        model = f"models:/{register.name or loaded.spec.name}@{register.alias}"
    request = make(model)
    if is_own or request.format is not None:  # what another model was trained on is known when it is loaded
        from penstock.training.predict.asked import input_options  # it brings torch along

        data, name = loaded.spec.data, request.format or loaded.spec.data.format
        input_options(name, data if name == data.format else None, request.options)

    def work() -> _Work:
        from penstock.flows.predict.flow import predict

        return _Work(predict, PREDICT_ENTRYPOINT, request, f"`{model}` scores `{request.input}`", "output")

    return _deploy(loaded, work, plan, say)


def _deploy(loaded: LoadedSpec, make_work: Callable[[], _Work], plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    _check_schedule(plan)
    notify = None if plan.notify in (None, NOBODY) else notify_of(str(plan.notify), plan.cron, plan.silence_h)
    if plan.silence_h is not None and notify is None:
        raise SpecError(
            f"--silence-h {plan.silence_h:g} goes with --notify, which names the receiver of the message",
            next_step="add --notify with the address of a webhook, or leave --silence-h out",
        )
    _check_pool_name(plan.pool)
    _require_server(loaded)
    stored, left_out = _environment_to_store(os.environ)
    with prefect_api(loaded.state_dir):
        work = make_work()
        full_name = f"{work.flow.name}/{loaded.spec.name}"
        with _refused_by_prefect("the deployment"), get_client(sync_client=True) as client:
            deployment_id = _put(client, full_name, work, plan, stored, say)
        url = url_for("deployment", deployment_id)
        messages = None
        with _refused_by_prefect("the messages"), get_client(sync_client=True) as client:
            if notify is not None:
                messages = put_messages(client, full_name, deployment_id, str(loaded.file), notify)
                say(f"a run that fails sends a message to {notify.shown}")
                if notify.silence_s is None:
                    say("silence sends none, since the schedule is not one of every day; --silence-h HOURS adds it")
                else:
                    say(f"{notify.silence_s / 3600:g} hours in which no run begins send one, too")
            elif plan.notify == NOBODY and forget_messages(client, full_name):
                say("it sends no messages any more")
            elif plan.notify is None and sends_messages(client, full_name):
                again = f"penstock deploy {loaded.file} --cron {plan.cron!r} --notify {NOBODY}"
                say(f"its messages stay as they are; to end them: {again}")
    for reason in left_out:
        say(f"not stored in Prefect, set it where the worker starts: {reason}")
    say(f"{full_name} runs at {plan.cron!r} {plan.timezone}: {url}")
    say(f"a worker performs it: prefect worker start --pool {plan.pool} --type process")
    return {
        "status": "done",
        "deployment": full_name,
        "id": str(deployment_id),
        "work_pool": plan.pool,
        "cron": plan.cron,
        "timezone": plan.timezone,
        "url": url,
        "environment": stored,
        "left_out": left_out,
        "notify": messages,
    }


@contextlib.contextmanager
def _refused_by_prefect(what: str) -> Iterator[None]:
    """Raise ServiceError for what the server does not take."""
    try:
        yield
    except (PrefectException, httpx.HTTPError) as error:
        raise ServiceError(
            f"Prefect at {os.environ['PREFECT_API_URL']} did not take {what}: {error}",
            next_step="penstock doctor looks at the server",
        ) from error


def _require_server(loaded: LoadedSpec) -> None:
    if not os.environ.get("PREFECT_API_URL"):
        raise ServiceError(
            f"cannot deploy {loaded.spec.name!r}: a schedule needs a Prefect server that stays, and PREFECT_API_URL is not set "
            "(the embedded server ends with its command)",
            next_step="prefect server start, which stays in its shell; in another one: "
            "export PREFECT_API_URL=http://127.0.0.1:4200/api, and the same command again",
        )


def _check_schedule(plan: Plan) -> None:
    cron, timezone = plan.cron, plan.timezone
    rule = 'five fields "minute hour day month weekday", such as "0 3 * * *" for every day at 03:00'
    # Prefect also takes a sixth field, for seconds: one field too many would then mean sixty times as many runs.
    if len(cron.split()) != 5:
        raise SpecError(f"--cron {cron!r} has {len(cron.split())} fields; a schedule is {rule}")
    try:
        CronSchedule(cron="0 3 * * *", timezone=timezone)
    except ValidationError as error:
        raise SpecError(f"--timezone {timezone!r} is not a time zone, such as Europe/Berlin or UTC") from error
    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise SpecError(f"--cron {cron!r} is not a schedule ({reason}); it is {rule}") from error
    try:
        asyncio.run(PlannedCron(cron=cron, timezone=timezone).get_dates(n=1))
    except ValueError as error:
        raise SpecError(f"--cron {cron!r} never comes: no month that it names has such a day; a schedule is {rule}") from error


def _check_pool_name(pool: str) -> None:
    if not pool.strip() or set(pool) & set(BANNED_CHARACTERS) or pool.lower().startswith("prefect"):
        raise SpecError(
            f"--pool {pool!r} is not a valid pool name: not empty, not beginning with 'prefect', and without "
            f"{' '.join(BANNED_CHARACTERS)}",
            next_step="leave --pool out to use the pool 'penstock', or give another name",
        )


def _environment_to_store(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the addresses that a deployment may remember, which hold no credentials and mean the same in every folder.

    The second value has a line `NAME reason` for each that is set and not stored.
    """
    stored: dict[str, str] = {}
    left_out: list[str] = []
    for name in _PASSED_ON:
        value = environ.get(name)
        if not value:
            continue
        parts = urllib.parse.urlsplit(value)
        token = parts.username if parts.scheme in ("http", "https") else None
        if token or parts.password or "password=" in parts.query.lower():
            left_out.append(f"{name} holds credentials")
        elif _is_relative(name, value):
            left_out.append(f"{name}={value} is relative to this folder")
        else:
            stored[name] = value
    return stored, left_out


def _is_relative(name: str, value: str) -> bool:
    if name.startswith("MLFLOW_"):
        path = value.removeprefix("sqlite:///") if value.startswith("sqlite:") else value
        return "://" not in path and path != "databricks" and not path.startswith("/")
    return name == "PENSTOCK_CACHE_DIR" and not value.startswith(("/", "~"))


def _put(
    client: SyncPrefectClient, full_name: str, work: _Work, plan: Plan, environment: dict[str, str], say: Callable[[str], None]
) -> UUID:
    name, request = full_name.partition("/")[2], work.request.model_dump(mode="json")
    _require_process_pool(client, plan.pool, say)
    _warn_of_changes(client, full_name, work.named_by, request[work.named_by], say)
    return client.create_deployment(
        flow_id=client.create_flow(work.flow),
        name=name,
        version=__version__,
        description=f"{work.about}, made by `penstock deploy`.",
        entrypoint=work.entrypoint,
        parameters={"request": request},
        parameter_openapi_schema=parameter_schema(work.flow).model_dump_for_openapi(),
        enforce_parameter_schema=True,
        # A second run at the same training would be refused by the lease; here it waits for its turn instead.
        concurrency_limit=1,
        concurrency_options=ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        schedules=[
            DeploymentScheduleCreate(schedule=CronSchedule(cron=plan.cron, timezone=plan.timezone), active=True, slug="cron")
        ],
        paused=False,
        work_pool_name=plan.pool,
        # With output streamed to it, a worker that dies takes its runs along at their next line of log.
        job_variables={"stream_output": False, "env": environment},
        tags=["penstock", name],
    )


def _require_process_pool(client: SyncPrefectClient, pool: str, say: Callable[[str], None]) -> None:
    try:
        there = client.read_work_pool(pool)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=pool, type=ProcessWorker.type, base_job_template=template))
        say(f"made the work pool {pool!r}")
        return
    if there.type != ProcessWorker.type:
        raise ServiceError(
            f"the work pool {pool!r} is of type {there.type!r}; penstock deploys to type process, whose workers see the files",
            next_step="name another pool with --pool; it is made if absent",
        )
    if there.is_paused:
        say(f"warning: the work pool is paused, so nothing runs until: prefect work-pool resume {shlex.quote(pool)}")


def _warn_of_changes(client: SyncPrefectClient, full_name: str, field: str, value: str, say: Callable[[str], None]) -> None:
    """Warn of other work that had this name, and of a pause that ends."""
    try:
        before = client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return
    worked_on = before.parameters.get("request", {}).get(field)
    if worked_on != value:
        say(f"warning: the {field} of {full_name} was {worked_on} until now; a deployment is named after the pipeline's `name`")
    if before.paused or not any(schedule.active for schedule in before.schedules):
        say(f"warning: {full_name} was paused until now; it runs again, on this schedule")
