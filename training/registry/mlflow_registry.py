"""How is MLflow's registry reached? A light door: what logs models brings pandas and scipy, and most commands log none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.redact import redact_text
from penstock.training.registry.aliases import aliases_of, give_alias, roll_back, rolled_back
from penstock.training.registry.registry import Registered, TrainedVersion
from penstock.training.tracking.mlflow_backend import open_client, patiently
from penstock.training.tracking.mlflow_store import mlflow_uri
from penstock.training.tracking.mlflow_tracker import MlflowTracker
from penstock.training.tracking.mlflow_versions import version_exists, version_of_alias
from penstock.training.tracking.tracker import Tracker

if TYPE_CHECKING:
    from penstock.training.checkpoint.start_from import StartWeights

__all__ = ["MLFLOW", "MlflowRegistry"]


class MlflowRegistry:
    """See `penstock.training.registry.registry.ModelRegistry`."""

    libraries = ("mlflow",)

    def default_uri(self, state_dir: Path) -> str:
        """That of the tracker: MLFLOW_TRACKING_URI, else a database below `state_dir`."""
        return mlflow_uri(state_dir)

    def register(self, uri: str, trained: TrainedVersion, tracker: Tracker) -> Registered:
        """Log the model to the tracker's run, or where the tracker is not MLflow's, to a run of its name; then register it."""
        from penstock.training.registry.register import register_model

        if isinstance(tracker, MlflowTracker):
            return register_model(tracker, trained)
        own = MlflowTracker.open(uri, trained.experiment, trained.run_name, tags=trained.tags, attempt=2)
        try:
            registered = register_model(own, trained)
        except BaseException:
            own.close("FAILED")
            raise
        own.close("FINISHED")
        return registered

    def missing(self, uri: str, registered: Mapping[str, Any]) -> str | None:
        """By the run, not by the address: the store may have moved with its folder, and a server may have another name now."""
        if version_exists(uri, registered["name"], registered["version"], registered["run_id"]):
            return None
        here = redact_text(uri)
        if here != registered["tracking_uri"]:
            return f"the model is registered at {registered['tracking_uri']}, and MLflow is now {here}"
        return f"version {registered['version']} of model {registered['name']} is no longer in the registry"

    def aliases(self, uri: str, name: str) -> dict[str, str]:
        """By the registered model, so that a model without the alias and a server that is away are two cases."""
        return aliases_of(open_client(uri), name, for_s=10)

    def give_alias(self, uri: str, name: str, alias: str, version: str) -> None:
        """See `KeepsAliases`."""
        give_alias(open_client(uri), name, alias, version)

    def tag(self, uri: str, name: str, version: str, tags: Mapping[str, str]) -> None:
        """See `KeepsAliases`."""
        client = open_client(uri)

        def write() -> None:
            for key, value in tags.items():
                client.set_model_version_tag(name, version, key, value)

        patiently("tag the version", write)

    def rolled_back(self, uri: str, name: str, alias: str, weights_digest: str) -> str | None:
        """By a tag of the version that lost the alias."""
        return rolled_back(open_client(uri), name, alias, weights_digest)

    def roll_back(self, uri: str, name: str, alias: str) -> tuple[str, str]:
        """See `KeepsAliases`."""
        return roll_back(open_client(uri), name, alias)

    def load(self, uri: str, name: str, version: str) -> Any:
        """Downloaded first, where the artifacts lie elsewhere."""
        from penstock.training.registry.load import load_model

        return load_model(f"models:/{name}/{version}", uri)

    def weights(self, uri: str, model: str) -> StartWeights:
        """See `GivesWeights`."""
        from penstock.training.registry.load import registered_weights

        return registered_weights(model, uri)

    def aliased(self, uri: str, name: str, alias: str) -> str | None:
        """Looked up at the server or in the database."""
        return version_of_alias(uri, name, alias)


MLFLOW = MlflowRegistry()
