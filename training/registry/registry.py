"""What is a model registry? The protocol of the register stage, and the names of registries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from urllib.parse import quote

import pyarrow as pa

from penstock.config import Section
from penstock.plugins import Plugins

if TYPE_CHECKING:  # a pipeline file is read without loading torch
    from penstock.training.checkpoint.start_from import StartWeights
    from penstock.training.model import ModelSpec
    from penstock.training.tracking.tracker import Tracker

__all__ = [
    "PREVIOUS",
    "REGISTRIES",
    "WEIGHTS_TAG",
    "GivesWeights",
    "KeepsAliases",
    "ModelRegistry",
    "Registered",
    "TrainedVersion",
    "alias_lease",
]

WEIGHTS_TAG = "penstock.weights_digest"
"""Tag of `TrainedVersion.tags`, by which `rolled_back` finds a model."""

PREVIOUS = "-previous"
"""Suffix of an alias: `champion-previous` is the version that held `champion` before."""


def alias_lease(name: str) -> str:
    """Return the path of the lease, below the storage, that is held while a model's aliases are read and moved."""
    return f"models/{quote(name, safe='')}/alias-lease"


@dataclass(frozen=True)
class TrainedVersion:
    """What is registered.

    Attributes:
        name: of the registered model; made if absent.
        alias: moved to this version; None for none.
        key: of the register stage with the weights: the same version is registered once by it.
        model: what the model is rebuilt from, besides its files, with what prepares raw rows for it.
        files: local files in one folder, such as a safetensors file; the folder is the caller's, and may be written to.
        example: some raw rows of the train split: the columns that the transforms begin with, without the label.
        tags: facts for machines, such as the dataset's digest and the code's version.
        description: paragraphs for people (markdown): the metrics, the model, the data.
        experiment: name of the pipeline.
        run_name: penstock's id of the run.
    """

    name: str
    alias: str | None
    key: str
    model: ModelSpec
    files: Sequence[Path]
    example: pa.Table
    tags: Mapping[str, str]
    experiment: str
    run_name: str
    description: Sequence[str] = ()


class Registered(Section):
    """A version in the registry. Recorded, and given back to `ModelRegistry.missing`."""

    name: str
    version: str
    uri: str
    """Address to load it by: `models:/<name>/<version>` at MLflow."""
    alias: str | None
    model_id: str = ""
    """MLflow's logged model behind the version; a registry without such ids leaves it empty."""
    run_id: str
    """The tracker's id of the run that trained it."""


class ModelRegistry(Protocol):
    """A model registry. Stateless; runs in the driver."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Distributions whose version is part of the register stage's key: another version registers again."""
        ...

    def default_uri(self, state_dir: Path) -> str:
        """Return the registry's address, from the environment, or below `state_dir`, the pipeline's folder on this machine."""
        ...

    def register(self, uri: str, trained: TrainedVersion, tracker: Tracker) -> Registered:
        """Register a version and set its alias. A second call with the same `key` gives the same version.

        Each write looks first whether an earlier try has done it: a process killed between any two leads to one version.

        Args:
            uri: of the registry, as `default_uri` returns it.
            trained: the model.
            tracker: of the run that trained it.

        Raises:
            ServiceError: the registry does not answer, or refuses.
            TrainingError: the model cannot predict the example rows.
        """
        ...

    def missing(self, uri: str, registered: Mapping[str, Any]) -> str | None:
        """Return why a recorded version is not valid any more, such as that it was deleted; None if it is there.

        A registry that does not answer counts as having it.

        Args:
            registered: a `Registered` as JSON, and as `tracking_uri` where it was registered, without secrets.
        """
        ...


REGISTRIES: Plugins[ModelRegistry] = Plugins(
    "model registry",
    "penstock.registries",
    {"mlflow": "penstock.training.registry.mlflow_registry:MLFLOW"},
    needs=("libraries", "default_uri", "register", "missing"),
)
"""By the name that `tracking.registry` gives."""


@runtime_checkable
class KeepsAliases(Protocol):
    """The methods that `register.promote` and `penstock rollback` need of a registry. Run in the driver.

    Every method raises ServiceError where the registry does not answer or refuses.
    """

    def aliases(self, uri: str, name: str) -> dict[str, str]:
        """Return alias -> version of a model; empty if there is no such model."""
        ...

    def give_alias(self, uri: str, name: str, alias: str, version: str) -> None:
        """Move `alias`; the version that held it gets `PREVIOUS` of it. A second call changes nothing."""
        ...

    def tag(self, uri: str, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Set tags of a version."""
        ...

    def tags(self, uri: str, name: str, version: str) -> Mapping[str, str]:
        """Return the tags of a version."""
        ...

    def describe(self, uri: str, name: str, version: str, paragraphs: Sequence[str]) -> None:
        """Replace `TrainedVersion.description` of a version."""
        ...

    def rolled_back(self, uri: str, name: str, alias: str, weights_digest: str) -> str | None:
        """Return when a version of these weights lost `alias` by `roll_back`; None if it did not, or got it back."""
        ...

    def roll_back(self, uri: str, name: str, alias: str) -> tuple[str, str]:
        """Swap `alias` and `PREVIOUS` of it. Returns (version that holds the alias now, version that lost it).

        Raises:
            SpecError: no version holds one of the two.
        """
        ...

    def load(self, uri: str, name: str, version: str) -> Any:
        """Load the model of a version, as `penstock.load_model` does."""
        ...


@runtime_checkable
class GivesWeights(Protocol):
    """The method that `train.start_from: models:/...` needs of a registry. Runs in the driver."""

    def weights(self, uri: str, model: str, *, whole: bool = False, file: str = ..., framework: str = ...) -> StartWeights:
        """Look up the weights of a version; they are fetched when they are read.

        Args:
            uri: of the registry, as `default_uri` returns it.
            model: `models:/name@alias` or `models:/name/version`.
            whole: for a function: the folder that was reported, or the weights, by `StartWeights.fetch`.
            file: with the weights; the default is that of torch models.
            framework: of the pipeline, for an error.

        Raises:
            SpecError: there is no such version, or it has no such weights.
            ServiceError: the registry does not answer.
        """
        ...
