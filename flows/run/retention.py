"""Which models of a pipeline have an alias, and what does a run that is done free?"""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

from penstock.errors import PenstockError
from penstock.messages import counted
from penstock.tasks.context import RunContext
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.room.free import Cleaning, clean
from penstock.tasks.room.plan import Going, RoomPlan
from penstock.training.registry.registries import REGISTRIES
from penstock.training.spec import TrackingSpec

__all__ = ["aliased_models", "apply_retention", "cleaned_by", "going_text"]

_KINDS = {"run": "run", "dataset": "dataset", "unit": "unit", "record": "record of stages"}


def aliased_models(ledger: Ledger, pipeline: str, state_dir: Path) -> dict[str, str]:
    """Version, as `models:/name/3` -> the alias it has now, of the models that the pipeline's runs registered.

    Raises:
        ServiceError: the registry does not answer, so that nobody knows.
        PreflightError: the package of a registry cannot be imported.
    """
    models: dict[tuple[str, str], set[str]] = {}
    for run in ledger.runs():
        uri = str(run.result.get("model_uri") or "")
        if run.pipeline == pipeline and uri.startswith("models:/"):
            registry = run.spec.get("tracking", {}).get("registry", TrackingSpec().registry)
            models.setdefault((registry, uri.removeprefix("models:/").rpartition("/")[0]), set()).add(uri)
    found: dict[str, str] = {}
    for registry, name in models:
        backend = REGISTRIES.get(registry)
        look_up = getattr(backend, "aliases", None)  # a registry of another package may have none
        aliases = look_up(backend.default_uri(state_dir), name) if look_up is not None else {}
        found |= {f"models:/{name}/{version}": f"{name}@{alias}" for alias, version in aliases.items()}
    return found


def cleaned_by(what: str) -> str:
    """What a cleaned run says of who cleaned it."""
    try:
        return f"{what} of {getpass.getuser()} on {socket.gethostname()}"
    except (KeyError, OSError):  # an account without a name
        return f"{what} on {socket.gethostname()}"


def going_text(going: tuple[Going, ...]) -> str:
    """`1.2 MB: 3 runs 1.0 MB, 2 units 0.2 MB`."""
    parts = []
    for kind, name in _KINDS.items():
        sizes = [each.size_bytes for each in going if each.kind == kind]
        if sizes:
            many = "records of stages" if kind == "record" else None
            parts.append(f"{counted(len(sizes), name, many)} {sum(sizes) / 1e6:,.1f} MB")
    return f"{sum(each.size_bytes for each in going) / 1e6:,.1f} MB: {', '.join(parts)}"


def apply_retention(ctx: RunContext) -> dict[str, int]:
    """Free what the section `retention` lets go, and say how much. Trouble is a warning."""
    retention = ctx.project.spec.retention
    if retention is None:
        return {}

    def tell(plan: RoomPlan) -> None:
        if plan.going:
            ctx.reporter.say(f"retention: frees {going_text(plan.going)}")

    gone: tuple[Going, ...] = ()
    try:
        cleaning = Cleaning(
            ledger=ctx.ledger,
            pipeline=ctx.run.pipeline,
            retention=retention,
            aliased=aliased_models(ctx.ledger, ctx.run.pipeline, ctx.state_dir),
            by=f"retention of run {ctx.run.run}",
        )
        gone = clean(cleaning, tell)
    except (PenstockError, OSError) as error:
        ctx.reporter.warn(f"retention: nothing more is freed: {error}")
    return {"freed_bytes": sum(each.size_bytes for each in gone)}
