"""Which tags and which logged model has a version of MLflow's registry?

Digests and keys are tags of the logged model and of the run: a version's own tags are what a person reads first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from penstock.training.tracking.mlflow_backend import open_client

__all__ = ["KEY_TAG", "find_version", "model_behind", "tags_behind", "version_exists"]

KEY_TAG = "penstock.register_key"

_MODEL_ID = re.compile(r"\bm-[0-9a-f]{32}\b")


def model_behind(version: ModelVersion) -> str | None:
    """MLflow's id of the logged model. Read from its address where a registry keeps no id, as those in databases do."""
    if version.model_id:
        return str(version.model_id)
    found = _MODEL_ID.search(version.source or "")
    return found[0] if found is not None else None


def tags_behind(client: MlflowClient, version: ModelVersion) -> Mapping[str, str]:
    """Tags of the logged model; empty if it was deleted.

    Raises:
        MlflowException: MLflow does not answer.
    """
    model_id = model_behind(version)
    if model_id is None:
        return {}
    try:
        return dict(client.get_logged_model(model_id).tags)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return {}
        raise


def find_version(client: MlflowClient, name: str, key: str, run_id: str) -> ModelVersion | None:
    """The version that a run registered under `key`, if there is one."""
    found = client.search_model_versions(f"name = '{name}' AND run_id = '{run_id}'")
    return next((version for version in found if tags_behind(client, version).get(KEY_TAG) == key), None)


def version_exists(tracking_uri: str, name: str, version: str, run_id: str) -> bool:
    """Whether the registry has that version, of that run. One that does not answer counts as having it."""
    try:
        return bool(open_client(tracking_uri).get_model_version(name, version).run_id == run_id)
    except MlflowException as error:
        return bool(error.error_code != "RESOURCE_DOES_NOT_EXIST")
