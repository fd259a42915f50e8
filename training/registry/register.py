"""How does a trained model become a version in MLflow's registry, once, with everything that loading it elsewhere needs?

The model is a pyfunc "from code": source text, JSON and the framework's files. Each step looks first whether an earlier try
has done it, so a kill between any two of them leads to one version, not two.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types.schema import AnyType, Array, ColSpec, DataType, ParamSchema, ParamSpec, Schema

from penstock.ingest.columns.casts import is_list, is_text
from penstock.ingest.columns.images import holds_images
from penstock.installed import PACKAGE_DIR
from penstock.training.model import ModelSpec
from penstock.training.registry.loaded_model import MODEL_FILE, LoadedModel, form_of
from penstock.training.registry.raw_rows import RawForm
from penstock.training.registry.registry import Registered, TrainedVersion
from penstock.training.tracking.mlflow_backend import patiently
from penstock.training.tracking.mlflow_store import TRAINING_VIEW
from penstock.training.tracking.mlflow_tracker import MlflowTracker
from penstock.training.tracking.mlflow_versions import KEY_TAG, find_version, model_behind

__all__ = ["register_model"]

_ENTRY = """from mlflow.models import set_model

from penstock.training.registry.serving import ServedModel

set_model(ServedModel())
"""

_ENTRY_FILE = "penstock_model.py"

_REQUIRED = (
    "blake3",
    "fsspec",
    "mlflow",
    "numpy",
    "pandas",
    "pillow",
    "pyarrow",
    "pydantic",
    "safetensors",
    "simplejpeg",
    "torch",
)
"""Distributions that training/registry/serving.py and torch's loader reach; user code and other packages add their own."""

_EXAMPLE_BYTES = 1 << 20

_READABLE_TAGS = ("penstock.run",)
"""Tags of the version, too; digests are on the logged model and on the run."""


def register_model(tracker: MlflowTracker, trained: TrainedVersion) -> Registered:
    """Log the model to the tracker's run and register it. A second call with the same key gives the same version.

    At most 1 MB of the example is kept, or one row of at most 16 MB.

    Raises:
        ServiceError: MLflow does not answer for two minutes, or refuses.
        TrainingError: the model cannot predict the example rows.
    """
    name, key = trained.name, trained.key
    client = tracker.run.client
    all_tags = {**trained.tags, KEY_TAG: key}
    version = patiently("search the registry", lambda: find_version(client, name, key, tracker.run_id))
    if version is None:
        found = patiently("search logged models", lambda: _find_model(client, tracker, key))
        if found is None or str(found.status) != "READY":
            with _model_folder(trained) as folder:
                found = patiently("log the model", lambda: _log_model(client, tracker, name, all_tags, folder, found))
        logged = found
        version = patiently("register the model", lambda: _create_version(client, trained, logged, tracker.run_id))
    number = str(version.version)
    uri = f"models:/{name}/{number}"
    model_id = str(model_behind(version))
    patiently("describe the model", lambda: _describe_model(client, trained, version, model_id))
    return Registered(name=name, version=number, uri=uri, alias=trained.alias, model_id=model_id, run_id=tracker.run_id)


def _find_model(client: MlflowClient, tracker: MlflowTracker, key: str) -> LoggedModel | None:
    wanted = f"source_run_id = '{tracker.run_id}' AND tags.`{KEY_TAG}` = '{key}'"
    found = client.search_logged_models([tracker.run.experiment_id], filter_string=wanted)
    return max(found, key=lambda model: str(model.status) == "READY", default=None)


def _log_model(
    client: MlflowClient, tracker: MlflowTracker, name: str, tags: Mapping[str, str], folder: Path, begun: LoggedModel | None
) -> LoggedModel:
    """Upload the folder as a logged model of the run; one that an earlier try began is completed."""
    model = begun or client.create_logged_model(
        tracker.run.experiment_id, name, source_run_id=tracker.run_id, tags=dict(tags), model_type="penstock"
    )
    description = Model.load(str(folder))
    description.model_id = description.model_uuid = model.model_id
    description.run_id = tracker.run_id
    description.artifact_path = model.artifact_location
    description.save(str(folder / "MLmodel"))
    client.log_model_artifacts(model.model_id, str(folder))
    outputs = client.get_run(tracker.run_id).outputs
    if outputs is None or all(output.model_id != model.model_id for output in outputs.model_outputs):
        client.log_outputs(tracker.run_id, [LoggedModelOutput(model.model_id, tracker.newest_step())])
    return client.finalize_logged_model(model.model_id, "READY")


def _create_version(client: MlflowClient, trained: TrainedVersion, model: LoggedModel, run_id: str) -> ModelVersion:
    name = trained.name
    with contextlib.suppress(MlflowException):  # it exists, or the next call raises
        client.create_registered_model(name, description=f"Models of pipeline `{trained.experiment}`.")
    # A request whose answer was lost may have made the version already.
    made = find_version(client, name, trained.key, run_id)
    readable = {key: value for key, value in trained.tags.items() if key in _READABLE_TAGS}
    return made or client.create_model_version(
        name,
        model.artifact_location,
        run_id=run_id,
        tags=readable,
        description=_description(trained, model, run_id),
        model_id=model.model_id,
    )


def _description(trained: TrainedVersion, model: LoggedModel, run_id: str) -> str:
    """Describe the version. Lists of versions show the first line: the metrics."""
    page = f"#/experiments/{model.experiment_id}/runs/{run_id}{TRAINING_VIEW}"
    run = f"Trained by run [{trained.run_name}]({page}), whose datasets, figures and curves are there."
    return "\n\n".join([*trained.description, run])


def _describe_model(client: MlflowClient, trained: TrainedVersion, version: ModelVersion, model_id: str) -> None:
    """Show the version on the logged model's page, as MLflow's own way to register does."""
    known = client.get_logged_model(model_id).tags
    versions = [{"name": trained.name, "version": str(version.version)}]
    wanted = {"mlflow.modelVersions": json.dumps(versions), "mlflow.note.content": "\n\n".join(trained.description)}
    if missing := {name: value for name, value in wanted.items() if value and name not in known}:
        client.set_logged_model_tags(model_id, missing)


@contextlib.contextmanager
def _model_folder(trained: TrainedVersion) -> Iterator[Path]:
    """Build the model's folder."""
    model, files = trained.model, trained.files
    with tempfile.TemporaryDirectory(prefix="penstock-model-") as folder:
        work = Path(folder)
        entry, spec_file = work / _ENTRY_FILE, files[0].parent / MODEL_FILE
        entry.write_text(_ENTRY)
        # Without the folder that the code came from, which has no meaning on another machine.
        portable = model.model_copy(update={"code": model.code.model_copy(update={"origin": ""})})
        spec_file.write_text(portable.model_dump_json(indent=1))
        rows = _plain(few_rows(trained.example))
        answer, ours = _answer(spec_file.parent, trained.example), work / "penstock.zip"
        _archive_code(ours)
        mlflow.pyfunc.save_model(
            str(work / "model"),
            python_model=str(entry),
            artifacts={"spec": str(spec_file), **{file.name: str(file) for file in files}},
            code_paths=[str(ours)],
            signature=_signature(form_of(model), answer),
            input_example=rows.to_pandas() if len(rows) else None,
            pip_requirements=_requirements(model),
            metadata={KEY_TAG: trained.key},
        )
        described = Model.load(str(work / "model"))
        # Python imports from the archive; and the paths that MLflow has noted are those of this temporary folder.
        described.flavors["python_function"].update(code=f"code/{ours.name}", model_code_path=_ENTRY_FILE)
        for kept in described.flavors["python_function"]["artifacts"].values():
            del kept["uri"]
        described.save(str(work / "model" / "MLmodel"))
        yield work / "model"


def _archive_code(archive: Path) -> None:
    """Write the modules that a model may need, which are all below `tasks`, as one file that Python imports from.

    Hundreds of small files would be hundreds of requests to an artifact store for each version that is registered or loaded.
    """
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for folder, folders, names in os.walk(PACKAGE_DIR, followlinks=True):
            folders[:] = sorted(set(folders) - {"__pycache__", "tasks", "flows"})
            for file in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
                # Without a time, so that equal code makes equal bytes.
                member = zipfile.ZipInfo(f"penstock/{file.relative_to(PACKAGE_DIR).as_posix()}")
                packed.writestr(member, file.read_bytes(), zipfile.ZIP_DEFLATED)


def few_rows(example: pa.Table) -> pa.Table:
    """Return the first rows of `example`, about 1 MB, or one of at most 16 MB: MLflow writes them as JSON."""
    row_bytes = max(1, example.nbytes // max(1, example.num_rows))
    return example.slice(0, max(int(row_bytes <= 16 * _EXAMPLE_BYTES), _EXAMPLE_BYTES // row_bytes))


def _plain(rows: pa.Table) -> pa.Table:
    """Convert to what MLflow can write as JSON: images to their bytes alone, as the signature has them, and decimals to text.

    There is no example of rows with durations, or with decimals inside of lists or structs.
    """
    for index, field in enumerate(rows.schema):
        if holds_images(field.type):
            rows = rows.set_column(index, field.name, pc.struct_field(rows.column(index), "bytes"))
        elif pa.types.is_decimal(field.type):
            rows = rows.set_column(index, field.name, rows.column(index).cast(pa.string()))
        elif "decimal" in str(field.type) or "duration" in str(field.type):
            return rows.slice(0, 0)
    return rows


def _answer(folder: Path, example: pa.Table) -> pd.DataFrame | None:
    """Predict the example, which also proves that the model can be rebuilt from its files."""
    model = LoadedModel(folder)
    return model.predict(example) if model.can_predict else None


def _requirements(model: ModelSpec) -> list[str]:
    """Return exact versions of the installed packages, without build tags such as `+cpu`, which no index has."""
    installed = {name: importlib.metadata.version(name) for name in _REQUIRED}
    for name, version in {**model.code.versions, **model.requires, **form_of(model).requires}.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            installed.setdefault(name, version)
    return [f"{name}=={version.split('+', 1)[0]}" for name, version in sorted(installed.items())]


def _signature(form: RawForm, answer: pd.DataFrame | None) -> ModelSignature:
    """Name a model's inputs, and describe its outputs by the answer to the input example; None where it cannot predict.

    MLflow would check the types of inputs more strictly than the model, which names row, column and value of what does not fit.
    """
    fields = [field for field in form.arrow_schema if field.name != form.label]
    inputs: list[Any] = [ColSpec(AnyType(), field.name, required=field.name not in form.unneeded) for field in fields]
    answers = () if answer is None else pa.Schema.from_pandas(answer, preserve_index=False)
    outputs = Schema([ColSpec(_type(field.type), field.name) for field in answers]) if answers else None
    return ModelSignature(Schema(inputs), outputs, ParamSchema([ParamSpec("on_error", DataType.string, "raise")]))


def _type(kind: pa.DataType) -> Any:
    if is_list(kind):
        return Array(_type(kind.value_type))
    if is_text(kind):
        return DataType.string
    return DataType.long if pa.types.is_integer(kind) else DataType.double
