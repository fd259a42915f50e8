"""Which version of a model holds an alias in MLflow, which held it before, and which lost it by a rollback?

The order of the writes is such that a process killed between any two can do all of them again.
"""

from __future__ import annotations

import datetime as dt
from functools import partial

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from penstock.errors import SpecError
from penstock.training.registry.registry import PREVIOUS, WEIGHTS_TAG
from penstock.training.tracking.mlflow_backend import patiently
from penstock.training.tracking.mlflow_versions import tags_behind

__all__ = ["aliases_of", "give_alias", "roll_back", "rolled_back"]


def aliases_of(client: MlflowClient, name: str, *, for_s: float = 120.0) -> dict[str, str]:
    """Alias -> version.

    Args:
        for_s: how long a server that is away is asked again.

    Raises:
        ServiceError: MLflow does not answer.
    """

    def asked() -> dict[str, str]:
        try:
            return {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return {}
            raise

    return patiently(f"look up the aliases of {name!r}", asked, for_s=for_s)


def give_alias(client: MlflowClient, name: str, alias: str, version: str) -> None:
    """See `KeepsAliases.give_alias`."""
    holder = aliases_of(client, name).get(alias)
    if holder == version:
        return
    if holder is not None:
        patiently(f"set alias {PREVIOUS!r}", lambda: client.set_registered_model_alias(name, PREVIOUS, holder))
    patiently(f"set alias {alias!r}", lambda: client.set_registered_model_alias(name, alias, version))


def rolled_back(client: MlflowClient, name: str, alias: str, weights_digest: str) -> str | None:
    """See `KeepsAliases.rolled_back`."""

    def search() -> str | None:
        lost = [version for version in client.search_model_versions(f"name = '{name}'") if _tag(alias) in version.tags]
        same = (version for version in lost if tags_behind(client, version).get(WEIGHTS_TAG) == weights_digest)
        return next((version.tags[_tag(alias)] for version in same), None)

    return patiently("search the registry", search)


def roll_back(client: MlflowClient, name: str, alias: str) -> tuple[str, str]:
    """See `KeepsAliases.roll_back`.

    Raises:
        SpecError, ServiceError: as there.
    """
    held = aliases_of(client, name)
    holder, before = held.get(alias), held.get(PREVIOUS)
    if holder is not None and holder == before:
        # Where a rollback was killed between its writes, both are at the version that was to lose the alias.
        before = client.get_model_version(name, holder).tags.get(_goes_to(alias))
    if holder is None or before is None:
        held_by = "; ".join(f"{each} is version {version}" for each, version in sorted(held.items()))
        raise SpecError(
            f"model {name!r} has nothing to roll alias {alias!r} back to: {held_by or 'no version of it has an alias'}",
            next_step=f"the version that loses the alias to another one gets the alias {PREVIOUS!r}; set it by hand in MLflow",
        )
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    for tag, value in ((_goes_to(alias), before), (_tag(alias), now)):
        patiently("tag the version", partial(client.set_model_version_tag, name, holder, tag, value))
    for tag in (_tag(alias), _goes_to(alias)):
        _untag(client, name, before, tag)
    give_alias(client, name, alias, before)
    _untag(client, name, holder, _goes_to(alias))
    return before, holder


def _untag(client: MlflowClient, name: str, version: str, tag: str) -> None:
    if tag in client.get_model_version(name, version).tags:
        patiently("untag the version", lambda: client.delete_model_version_tag(name, version, tag))


def _goes_to(alias: str) -> str:
    """Tag of a version that is about to lose the alias: which version gets it."""
    return f"penstock.rolling_back.{alias}"


def _tag(alias: str) -> str:
    return f"penstock.rolled_back.{alias}"
