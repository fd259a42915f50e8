"""How does a pipeline get onto a schedule? As a Prefect deployment of our flow for a process work pool.

What is deployed is a name, a schedule and the path of the pipeline file; a worker imports the installed penstock and reads the
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
from prefect.client.schemas.responses import DeploymentResponse
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
from penstock.flows.verbs.deploy.notify import NOBODY, Notify, forget_messages, notify_of, put_messages, sends_messages

__all__ = ["ENTRYPOINT", "PREDICT_ENTRYPOINT", "Messages", "deploy_pipeline", "deploy_predictions"]


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


class Messages(NamedTuple):
    """What a person asks for, as the command line takes it."""

    to: str | None = None
    """A webhook, a mail address, or `none` to remove what was there; None leaves all as it is."""
    silence_h: float | None = None
    """Hours without a run after which a message comes, instead of a day."""


AS_THEY_ARE = Messages()


class _Environment(NamedTuple):
    stored: dict[str, str]
    left_out: tuple[str, ...]
    """`NAME: why`, for what was set and is not stored."""


class _Work(NamedTuple):
    """What a deployment performs."""

    flow: Flow[Any, Any]
    entrypoint: str
    request: BaseModel
    about: str
    named_by: str
    """The field of the request whose change means other work under the same name."""


def deploy_pipeline(
    file: Path, cron: str, pool: str, overrides: list[str], say: Callable[[str], None], messages: Messages = AS_THEY_ARE
) -> dict[str, Any]:
    """Create the deployment `penstock/<pipeline name>`, or update it if it exists.

    Args:
        file: the pipeline file; workers must find it under the same absolute path.
        cron: five fields, UTC.
        pool: work pool of type process; it is created if absent.
        overrides: `a.b=value` texts that every run of the deployment applies.
        say: takes lines for a person.
        messages: who gets a message when a run fails or none begins.

    Returns:
        What `penstock deploy --json` prints.

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

    return _deploy(loaded, work, cron, pool, say, messages)


def deploy_predictions(
    file: Path,
    cron: str,
    pool: str,
    model: str | None,
    make: Callable[[str], PredictRequest],
    say: Callable[[str], None],
    messages: Messages = AS_THEY_ARE,
) -> dict[str, Any]:
    """Create the deployment `penstock-predict/<pipeline name>`, or update it. Result as that of `deploy_pipeline`.

    Args:
        file: the pipeline file whose model scores; its project holds the MLflow store if no server is named.
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
                f"{loaded.file}: its section register names no alias, so which version scores is not said",
                next_step=f"set register.alias, or say which: --model models:/{register.name or loaded.spec.name}@ALIAS",
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

    return _deploy(loaded, work, cron, pool, say, messages)


def _deploy(
    loaded: LoadedSpec,
    work: Callable[[], _Work],
    cron: str,
    pool: str,
    say: Callable[[str], None],
    messages: Messages,
) -> dict[str, Any]:
    _check_cron(cron)
    notify = None if messages.to in (None, NOBODY) else notify_of(str(messages.to), cron, messages.silence_h)
    if messages.silence_h is not None and notify is None:
        raise SpecError(
            f"--silence-h {messages.silence_h:g} goes with --notify, which says who gets the message",
            next_step="add --notify with the address of a webhook or a mail address, or leave --silence-h out",
        )
    _check_pool_name(pool)
    _require_server(loaded)
    environment = _environment_to_store(os.environ)
    with prefect_api(loaded.state_dir):
        result = _put(loaded.spec.name, work(), cron, pool, environment, say)
        result["notify"] = _notify(result, str(loaded.file), notify, say, remove=messages.to == NOBODY)
    for left_out in environment.left_out:
        say(f"not stored in Prefect, set it where the worker starts: {left_out}")
    say(f"{result['deployment']} runs at {cron!r} UTC: {result['url']}")
    say(f"a worker performs it: prefect worker start --pool {pool} --type process")
    return result


def _notify(
    result: Mapping[str, Any], file: str, notify: Notify | None, say: Callable[[str], None], *, remove: bool
) -> dict[str, Any] | None:
    """Bring the automations up to date; without `--notify` they stay as they are, and a line says how they go."""
    name = result["deployment"]
    with _refused_by_prefect("the messages"), get_client(sync_client=True) as client:
        if notify is not None:
            put = put_messages(client, name, UUID(result["id"]), file, notify)
            say(f"a run that fails sends a message to {put['to']}")
            if notify.silence_s is None:
                say("its schedule is not one of every day: --silence-h HOURS sends a message when no run begins for so long")
            else:
                say(f"so does a time of {notify.silence_s / 3600:g} hours in which no run begins")
            return put
        if remove and forget_messages(client, name):
            say("it sends no messages any more")
        elif not remove and sends_messages(client, name):
            say(
                f"its messages stay as they are; to end them: "
                f"penstock deploy {file} --cron {result['cron']!r} --notify {NOBODY}"
            )
    return None


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


def _check_cron(cron: str) -> None:
    rule = 'five fields "minute hour day month weekday", such as "0 3 * * *" for every day at 03:00 UTC'
    # Prefect also takes a sixth field, for seconds: one field too many would then mean sixty times as many runs.
    if len(cron.split()) != 5:
        raise SpecError(f"--cron {cron!r} has {len(cron.split())} fields; a schedule is {rule}")
    try:
        CronSchedule(cron=cron, timezone="UTC")
    except ValidationError as error:
        reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise SpecError(f"--cron {cron!r} is not a schedule ({reason}); it is {rule}") from error
    try:
        asyncio.run(PlannedCron(cron=cron, timezone="UTC").get_dates(n=1))
    except ValueError as error:
        raise SpecError(
            f"--cron {cron!r} never comes: no month that it names has such a day; a schedule is {rule}",
            next_step="correct the day or the month, and run the same command again",
        ) from error


def _check_pool_name(pool: str) -> None:
    """Refuse what Prefect does not take as the name of a work pool, before it is asked."""
    if not pool.strip() or set(pool) & set(BANNED_CHARACTERS) or pool.lower().startswith("prefect"):
        raise SpecError(
            f"--pool {pool!r} is no name for a work pool: it is not empty, does not begin with 'prefect', and has none of "
            f"{' '.join(BANNED_CHARACTERS)}",
            next_step="leave --pool out to use the pool 'penstock', or give another name",
        )


def _environment_to_store(environ: Mapping[str, str]) -> _Environment:
    """Choose what a deployment may remember: addresses without credentials that mean the same in every folder."""
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
    return _Environment(stored, tuple(left_out))


def _is_relative(name: str, value: str) -> bool:
    if name.startswith("MLFLOW_"):
        path = value.removeprefix("sqlite:///") if value.startswith("sqlite:") else value
        return "://" not in path and path != "databricks" and not path.startswith("/")
    return name == "PENSTOCK_CACHE_DIR" and not value.startswith(("/", "~"))


def _put(name: str, work: _Work, cron: str, pool: str, environment: _Environment, say: Callable[[str], None]) -> dict[str, Any]:
    full_name, request = f"{work.flow.name}/{name}", work.request.model_dump(mode="json")
    schedule = DeploymentScheduleCreate(schedule=CronSchedule(cron=cron, timezone="UTC"), active=True, slug="cron")
    with _refused_by_prefect("the deployment"), get_client(sync_client=True) as client:
        _require_process_pool(client, pool, say)
        before = _deployed(client, full_name)
        if before is not None:
            _say_what_ends(before, full_name, work.named_by, request[work.named_by], say)
        deployment_id = client.create_deployment(
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
            schedules=[schedule],
            paused=False,
            work_pool_name=pool,
            # With output streamed to it, a worker that dies takes its runs along at their next line of log.
            job_variables={"stream_output": False, "env": environment.stored},
            tags=["penstock", name],
        )
    return {
        "status": "done",
        "deployment": full_name,
        "id": str(deployment_id),
        "work_pool": pool,
        "cron": cron,
        "url": url_for("deployment", deployment_id),
        "environment": environment.stored,
        "left_out": list(environment.left_out),
    }


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


def _deployed(client: SyncPrefectClient, full_name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return None


def _say_what_ends(before: DeploymentResponse, full_name: str, field: str, value: str, say: Callable[[str], None]) -> None:
    """What somebody may have meant to last: other work under this name, and a pause."""
    worked_on = before.parameters.get("request", {}).get(field)
    if worked_on != value:
        say(f"warning: the {field} of {full_name} was {worked_on} until now; a deployment is named after the pipeline's `name`")
    if before.paused or not any(schedule.active for schedule in before.schedules):
        say(f"warning: {full_name} was paused until now; it runs again, on this schedule")
