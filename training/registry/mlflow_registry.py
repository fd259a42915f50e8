"""How is MLflow's registry reached? What logs models is imported when a model is logged: it brings pandas and scipy."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from penstock.errors import SpecError
from penstock.redact import redact_text
from penstock.training.registry.registry import PREVIOUS, WEIGHTS_TAG, Registered, TrainedVersion
from penstock.training.tracking.mlflow_backend import open_client, patiently
from penstock.training.tracking.mlflow_store import mlflow_uri
from penstock.training.tracking.mlflow_tracker import MlflowTracker
from penstock.training.tracking.mlflow_versions import model_behind, tags_behind, version_exists
from penstock.training.tracking.tracker import Tracker

if TYPE_CHECKING:
    from penstock.training.checkpoint.start_from import StartWeights

__all__ = ["MLFLOW", "MlflowRegistry"]


class MlflowRegistry:
    """See `ModelRegistry`, `KeepsAliases` and `GivesWeights` in `penstock.training.registry.registry`."""

    libraries = ("mlflow",)

    def default_uri(self, state_dir: Path) -> str:
        """Return the tracker's: MLFLOW_TRACKING_URI, else a database below `state_dir`."""
        return mlflow_uri(state_dir)

    def register(self, uri: str, trained: TrainedVersion, tracker: Tracker) -> Registered:
        """Log the model to the tracker's run, or if the tracker is not MLflow's, to a run of its name; then register it."""
        from penstock.training.registry.register import register_model

        if isinstance(tracker, MlflowTracker):
            registered = register_model(tracker, trained)
        else:
            own = MlflowTracker.open(uri, trained.experiment, trained.run_name, tags=trained.tags, attempt=2)
            try:
                registered = register_model(own, trained)
            except BaseException:
                own.close("FAILED")
                raise
            own.close("FINISHED")
        if trained.alias is not None:
            self.give_alias(uri, trained.name, trained.alias, registered.version)
        return registered

    def missing(self, uri: str, registered: Mapping[str, Any]) -> str | None:
        """Look by the run, not by the address: the store may have moved with its folder, and a server may be renamed."""
        if version_exists(uri, registered["name"], registered["version"], registered["run_id"]):
            return None
        here = redact_text(uri)
        if here != registered["tracking_uri"]:
            return f"the model is registered at {registered['tracking_uri']}, and MLflow is now {here}"
        return f"version {registered['version']} of model {registered['name']} is no longer in the registry"

    def aliases(self, uri: str, name: str) -> dict[str, str]:
        """See `KeepsAliases`. A server that is away is retried for 10 s."""
        return _aliases(open_client(uri), name, for_s=10)

    def give_alias(self, uri: str, name: str, alias: str, version: str) -> None:
        """See `KeepsAliases`."""
        client = open_client(uri)
        holder = _aliases(client, name).get(alias)
        if holder == version:
            return
        if holder is not None:
            _set_alias(client, name, alias + PREVIOUS, holder)
        _set_alias(client, name, alias, version)

    def tag(self, uri: str, name: str, version: str, tags: Mapping[str, str]) -> None:
        """See `KeepsAliases`."""
        client = open_client(uri)
        for key, value in tags.items():
            patiently("tag the version", partial(client.set_model_version_tag, name, version, key, value))

    def tags(self, uri: str, name: str, version: str) -> Mapping[str, str]:
        """See `KeepsAliases`."""
        client = open_client(uri)
        return dict(patiently("look up the tags", lambda: client.get_model_version(name, version).tags))

    def describe(self, uri: str, name: str, version: str, paragraphs: Sequence[str]) -> None:
        """See `KeepsAliases`; the last paragraph, which links to the run, stays."""
        client, text = open_client(uri), "\n\n".join(paragraphs)

        def write() -> None:
            known = client.get_model_version(name, version)
            link = (known.description or "").split("\n\n")[-1]
            client.update_model_version(name, version, f"{text}\n\n{link}")
            if (model_id := model_behind(known)) is not None:
                client.set_logged_model_tags(model_id, {"mlflow.note.content": text})

        patiently("describe the version", write)

    def rolled_back(self, uri: str, name: str, alias: str, weights_digest: str) -> str | None:
        """See `KeepsAliases`; found by a tag of the version that lost the alias."""
        client, tag = open_client(uri), _lost_tag(alias)

        def search() -> str | None:
            lost = [version for version in client.search_model_versions(f"name = '{name}'") if tag in version.tags]
            same = (version for version in lost if tags_behind(client, version).get(WEIGHTS_TAG) == weights_digest)
            return next((version.tags[tag] for version in same), None)

        return patiently("search the registry", search)

    def roll_back(self, uri: str, name: str, alias: str) -> tuple[str, str]:
        """See `KeepsAliases`. A process killed before the alias moves can do it again."""
        client = open_client(uri)
        held = _aliases(client, name)
        holder, before = held.get(alias), held.get(alias + PREVIOUS)
        if holder is None or before in (None, holder):
            aliases = [each for each in sorted(held) if not each.endswith(PREVIOUS)]
            if alias not in aliases and aliases:
                next_step = f"name one that it has ({', '.join(aliases)}), as in: penstock rollback {name}@ALIAS"
                raise SpecError(f"model {name!r} has no alias {alias!r} to roll back", next_step=next_step)
            held_by = "; ".join(f"{each} is version {version}" for each, version in sorted(held.items()))
            raise SpecError(
                f"model {name!r} has nothing to roll alias {alias!r} back to: {held_by or 'no version of it has an alias'}",
                next_step=f"set the alias {alias + PREVIOUS!r} by hand in MLflow, which a version that loses {alias!r} gets",
            )
        assert before is not None
        tag = _lost_tag(alias)
        self.tag(uri, name, holder, {tag: dt.datetime.now(dt.UTC).isoformat(timespec="seconds")})
        if tag in client.get_model_version(name, before).tags:
            patiently("untag the version", lambda: client.delete_model_version_tag(name, before, tag))
        _set_alias(client, name, alias, before)
        _set_alias(client, name, alias + PREVIOUS, holder)
        return before, holder

    def load(self, uri: str, name: str, version: str) -> Any:
        """See `KeepsAliases`; downloads the files first if they lie elsewhere."""
        from penstock.training.registry.load import load_model

        return load_model(f"models:/{name}/{version}", uri)

    def weights(self, uri: str, model: str, **of_start: Any) -> StartWeights:
        """See `GivesWeights`."""
        from penstock.training.registry.load import registered_weights

        return registered_weights(model, uri, **of_start)


def _aliases(client: MlflowClient, name: str, *, for_s: float = 120.0) -> dict[str, str]:
    def look_up() -> dict[str, str]:
        try:
            return {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return {}
            raise

    return patiently(f"look up the aliases of {name!r}", look_up, for_s=for_s)


def _set_alias(client: MlflowClient, name: str, alias: str, version: str) -> None:
    patiently(f"set alias {alias!r}", lambda: client.set_registered_model_alias(name, alias, version))


def _lost_tag(alias: str) -> str:
    """Name the tag of a version that lost the alias by a rollback: its value is the time."""
    return f"penstock.rolled_back.{alias}"


MLFLOW = MlflowRegistry()
