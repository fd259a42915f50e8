"""How is a registered model found and loaded? By its address in the registry, the run that trained it, or its folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import DataError, ServiceError, SpecError
from penstock.redact import redact_text
from penstock.training.checkpoint.folder import FOLDER
from penstock.training.checkpoint.manifest import MODEL
from penstock.training.checkpoint.start_from import StartWeights, refuse_other_framework
from penstock.training.registry.loaded_model import MODEL_FILE, LoadedModel
from penstock.training.registry.registry import WEIGHTS_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

__all__ = ["FetchedModel", "fetched_model", "load_model", "registered_weights"]

_ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")

_MOST_LISTED = 8
"""Models that an error lists."""


class FetchedModel(NamedTuple):
    """A model's files on this machine, and which version of which model they are."""

    folder: Path
    name: str | None = None
    version: str | None = None

    @property
    def uri(self) -> str:
        """`models:/NAME/VERSION`, or the folder."""
        return str(self.folder) if self.name is None else f"models:/{self.name}/{self.version}"


def load_model(model: str | Path, tracking_uri: str | None = None) -> LoadedModel:
    """Load a registered model that predicts from raw rows. Needs neither Prefect nor Ray.

    Args:
        model: `models:/name@alias` or `models:/name/version`; a run, by penstock's name or MLflow's id of it, whose newest
            version is taken; or a folder that holds a model.
        tracking_uri: of MLflow. By default MLFLOW_TRACKING_URI, or what `mlflow.set_tracking_uri` was called with, or the
            store of the project that the working directory lies in.

    Raises:
        ServiceError: MLflow does not answer, has no such model, or no store was found.
        DataError: the folder holds no model.
        UserCodeError, CheckpointError, PreflightError, SpecError: as `LoadedModel`.
    """
    with fetched_model(model, tracking_uri) as found:
        return LoadedModel(found.folder)


@contextlib.contextmanager
def fetched_model(model: str | Path, tracking_uri: str | None = None) -> Iterator[FetchedModel]:
    """Bring a model's files to this machine for the block. Arguments and errors are those of `load_model` before it loads."""
    folder = Path(model)
    if not str(model).startswith(("models:", "runs:")) and folder.is_dir():
        yield FetchedModel(_model_folder(folder))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-model-") as fetched:
        yield _fetched(str(model), tracking_uri or _found_uri(), fetched)


def registered_weights(
    model: str, uri: str, *, whole: bool = False, file: str = MODEL, framework: str = "torch"
) -> StartWeights:
    """See `GivesWeights.weights`.

    Raises:
        SpecError, ServiceError: as there.
    """
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    from penstock.training.tracking.mlflow_versions import tags_behind

    if (parts := _ADDRESS.fullmatch(model)) is None:
        raise SpecError(
            f"train.start_from: {model!r} is not the address of a registered model",
            next_step="write models:/NAME@ALIAS or models:/NAME/VERSION",
        )
    client = _client(uri)
    try:
        version = _version(client, parts)
        folder = f"{version.source}/artifacts"
        files = mlflow.artifacts.list_artifacts(artifact_uri=folder, tracking_uri=uri)
        digest = tags_behind(client, version).get(WEIGHTS_TAG)
    except MlflowException as error:
        problem, there = f"train.start_from: {model} at {redact_text(uri)}: {error.message}", _there(client)
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # the second of an alias
            raise SpecError(problem, next_step=f"{there}name the registry that has it: MLFLOW_TRACKING_URI") from error
        raise ServiceError(problem, next_step="when it answers again, run the same command") from error
    found = f"models:/{version.name}/{version.version}"
    names = {Path(file.path).name for file in files}
    part = FOLDER if whole and FOLDER in names else file
    if part not in names and MODEL_FILE in names:
        loader = json.loads(_content(f"{folder}/{MODEL_FILE}", uri))["loader"]
        refuse_other_framework(found, loader.removeprefix("penstock.training.frameworks.").partition(".")[0], framework)
    if part not in names or digest is None:
        raise SpecError(
            f"train.start_from: {found} has no {part}, so it is not a model of that framework that penstock has registered",
            next_step="download its weights, and name the file (docs/recipe.md)",
        )
    read, fetch = partial(_content, f"{folder}/{part}", uri), partial(_fetch, f"{folder}/{part}", uri)
    return StartWeights(found, lambda: digest, read, fetch if whole else None)


def _content(artifact: str, uri: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="penstock-weights-") as folder:
        _fetch(artifact, uri, Path(folder))
        return next(Path(folder).iterdir()).read_bytes()


def _fetch(artifact: str, uri: str, into: Path) -> None:
    """Download a file into a folder, or the content of one."""
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    try:
        with tempfile.TemporaryDirectory(prefix="penstock-weights-") as folder:
            found = Path(mlflow.artifacts.download_artifacts(artifact, dst_path=folder, tracking_uri=uri))
            for each in found.iterdir() if found.is_dir() else [found]:
                shutil.move(each, into / each.name)
    except MlflowException as error:
        raise ServiceError(
            f"train.start_from: {redact_text(artifact)} cannot be downloaded: {error.message}",
            next_step="when MLflow and its artifact store answer again, run the same command",
        ) from error


def _model_folder(folder: Path) -> Path:
    """Return the folder of the model's files: the given one, or `artifacts` in one that MLflow has written."""
    for place in (folder, folder / "artifacts"):
        if (place / MODEL_FILE).is_file():
            return place
    raise DataError(
        f"{folder} has no {MODEL_FILE}, so penstock has not registered it",
        next_step="give models:/NAME@ALIAS, a run, or the folder of a registered model",
    )


def _found_uri() -> str:
    import mlflow

    from penstock.training.tracking.mlflow_store import mlflow_uri

    if os.environ.get("MLFLOW_TRACKING_URI") or mlflow.is_tracking_uri_set():  # type: ignore[no-untyped-call]
        return mlflow.get_tracking_uri()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / ".penstock" / "mlflow" / "mlflow.db").is_file():
            return mlflow_uri(folder / ".penstock")
    raise ServiceError(
        f"no MLflow store was found: {here} lies in no project that has run, and MLFLOW_TRACKING_URI is not set",
        next_step='give its address as `penstock run` prints it, load_model(MODEL, tracking_uri="sqlite:///..."), or change to '
        "the project's folder",
    )


def _there(client: MlflowClient) -> str:
    """List models of the registry, as the beginning of a sentence; empty if it has none or does not answer."""
    from mlflow.exceptions import MlflowException

    try:
        models = client.search_registered_models(max_results=_MOST_LISTED)
    except MlflowException:  # the error about the model itself is what counts
        return ""
    names = [f"models:/{model.name}@{alias}" for model in models for alias in sorted(model.aliases)]
    names = names or [f"models:/{model.name}/{model.latest_versions[-1].version}" for model in models if model.latest_versions]
    return f"give one that is there ({', '.join(names[:_MOST_LISTED])}), or " if names else ""


def _client(uri: str) -> MlflowClient:
    from penstock.training.tracking.mlflow_backend import open_client
    from penstock.training.tracking.mlflow_store import database_of, relocate_artifacts

    if (database := database_of(uri)) is not None:
        if not database.is_file():  # MLflow would make one
            raise ServiceError(f"there is no MLflow store {database}", next_step="correct the address: MLFLOW_TRACKING_URI")
        relocate_artifacts(database)
    return open_client(uri)


def _version(client: MlflowClient, address: re.Match[str]) -> ModelVersion:
    if address["alias"]:
        return client.get_model_version_by_alias(address["name"], address["alias"])
    return client.get_model_version(address["name"], address["version"])


def _fetched(model: str, uri: str, into: str) -> FetchedModel:
    import mlflow.artifacts
    from mlflow.exceptions import MlflowException

    client = _client(uri)
    try:
        if (parts := _ADDRESS.fullmatch(model)) is not None:
            version = _version(client, parts)
        else:
            run = model.removeprefix("runs:/")
            found = [*client.search_model_versions(f"run_id = '{run}'")]
            found = found or [*client.search_model_versions(f"tag.`penstock.run` = '{run}'")]
            if not found:
                raise DataError(
                    f"{model!r} is not a folder, not models:/NAME@ALIAS, and not a run at {redact_text(uri)} that registered "
                    "a model",
                    next_step="`penstock status` shows the runs of a project",
                )
            version = max(found, key=lambda version: int(version.version))
        # Files of this machine are read where they lie.
        place = None if str(version.source).startswith("file:") else into
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=version.source, dst_path=place, tracking_uri=uri))
    except MlflowException as error:
        raise ServiceError(
            f"{model} cannot be loaded from {redact_text(uri)}: {error.message}",
            next_step=f"{_there(client)}name the registry that has it: MLFLOW_TRACKING_URI, or tracking_uri=... in a program",
        ) from error
    return FetchedModel(_model_folder(folder), version.name, str(version.version))
