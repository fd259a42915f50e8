"""What of penstock's own MLflow folder (`.penstock/mlflow`) goes with a run that was cleaned? Its files and its versions.

Parameters, metrics and tags stay, which are small. A server's store is never touched, nor a database of other people.
"""

from __future__ import annotations

import datetime as dt
import shutil
import urllib.parse
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import LoggedModel
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from penstock.errors import ServiceError
from penstock.training.tracking.mlflow_backend import open_client
from penstock.training.tracking.relocate_mlflow import artifacts_beside, database_of, follow_its_folder

__all__ = ["CLEANED_TAG", "OldRun", "old_runs", "remove_files"]


CLEANED_TAG = "penstock.cleaned"


@dataclass(frozen=True)
class OldRun:
    """A run whose files go.

    Attributes:
        run_id: MLflow's.
        versions: name and number of those that it registered.
        models: MLflow's ids of its logged models, with their folders.
        folder: of the run itself: while it is there, the run is not done with.
    """

    run_id: str
    versions: tuple[tuple[str, str], ...]
    models: tuple[tuple[str, Path | None], ...]
    folder: Path
    size_bytes: int


def old_runs(tracking_uri: str, run_ids: Iterable[str], kept: Collection[str]) -> list[OldRun]:
    """Those of the runs that have files left in penstock's own folder and no version that stays.

    Args:
        run_ids: MLflow's ids of runs that were cleaned.
        kept: versions that stay, as `models:/name/3`; one with an alias stays whatever this says.

    Raises:
        ServiceError: the database cannot be read.
    """
    database = database_of(tracking_uri)
    if database is None or database.parts[-3:-1] != (".penstock", "mlflow") or not database.exists():
        return []
    here = artifacts_beside(database)
    left = [run_id for run_id in run_ids if (here / run_id).is_dir()]
    if not left:
        return []
    try:
        follow_its_folder(database)
        client = open_client(tracking_uri)
        found = [_old_run(client, here, run_id, kept) for run_id in left]
    except MlflowException as error:
        raise ServiceError(f"MLflow's database {database} cannot be read: {error}", next_step="penstock doctor") from error
    return [each for each in found if each is not None]


def _old_run(client: MlflowClient, here: Path, run_id: str, kept: Collection[str]) -> OldRun | None:
    versions = client.search_model_versions(f"run_id = '{run_id}'")
    for version in versions:
        aliases = client.get_registered_model(version.name).aliases.values()
        if str(version.version) in map(str, aliases) or f"models:/{version.name}/{version.version}" in kept:
            return None
    models = [(model.model_id, _folder_of(model, here)) for model in _models_of(client, run_id)]
    folders = [here / run_id, *(folder for _, folder in models if folder is not None)]
    return OldRun(
        run_id,
        tuple((version.name, str(version.version)) for version in versions),
        tuple(models),
        here / run_id,
        sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file()),
    )


def _models_of(client: MlflowClient, run_id: str) -> list[LoggedModel]:
    experiment = client.get_run(run_id).info.experiment_id
    return list(client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'"))


def _folder_of(model: LoggedModel, here: Path) -> Path | None:
    """The model's folder, if it is one of penstock's: `artifacts/models/<id>`."""
    address = str(model.artifact_location)
    if not address.startswith("file://"):
        return None
    folder = Path(urllib.parse.unquote(address.removeprefix("file://"))).parent
    return folder if folder.is_relative_to(here) and folder.name == model.model_id and folder.is_dir() else None


def remove_files(tracking_uri: str, old: Iterable[OldRun]) -> int:
    """Delete versions, models and files; returns the bytes. A kill leaves what the next call, after `old_runs`, completes.

    Raises:
        ServiceError: the database cannot be written.
        OSError: a file cannot be deleted.
    """
    client, freed = open_client(tracking_uri), 0
    today = dt.datetime.now(dt.UTC).date().isoformat()
    for run in old:
        try:
            client.set_tag(run.run_id, CLEANED_TAG, today)
            for name, version in run.versions:
                client.delete_model_version(name, version)
            for model, folder in run.models:
                if folder is not None:  # before its record, by which it is found
                    shutil.rmtree(folder)
                client.delete_logged_model(model)
        except MlflowException as error:
            raise ServiceError(f"MLflow's run {run.run_id} cannot be cleaned: {error}", next_step="penstock doctor") from error
        shutil.rmtree(run.folder)
        freed += run.size_bytes
    return freed
